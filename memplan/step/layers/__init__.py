"""What the parts of a decoder layer do, operation by operation: attention, feed-forward parts, and how they are joined.

Every function here mirrors one in ``memplan/lab`` line by line, or the code of a stack's library; their traces are the judge.
"""
