"""A survey of stacks: jobs drawn at random, formula beside the trace of the library's own code.

``python -m tests.survey.stacks --jobs 200 --seed 7`` needs ``memplan[stacks]``.
"""
