"""Which bytes are alive where several forwards of a model have one backward, or are run twice for their gradients?"""
