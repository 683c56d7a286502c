"""A survey of stacks: jobs drawn at random, formula beside the trace of the library's own code.

``python -m memplan.lab.stack_survey --jobs 200 --seed 7`` needs ``memplan[stacks]``.
"""
