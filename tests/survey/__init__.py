"""Formula against trace on jobs drawn at random: ``python -m tests.survey --seed 1 --jobs 300``.

A grid shows that the configurations on it agree; a survey estimates how often any do. Every job is a model of a
family (a released one cut in depth, or an odd one) under a training config whose keys are drawn one by one.
"""
