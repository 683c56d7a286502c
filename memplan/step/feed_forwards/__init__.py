"""What does a feed-forward part, dense or of experts, do on a tape?"""
