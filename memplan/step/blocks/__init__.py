"""What the parts of a decoder do, operation by operation, as the reference model does it.

Every function here mirrors one in ``memplan/lab`` line by line; the lab's traces are the judge.
"""
