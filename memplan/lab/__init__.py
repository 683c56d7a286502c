"""Reproduction and exploration: experiments, training runs, and formula against trace."""

from memplan.host.this_machine import ignore_missing_numpy

ignore_missing_numpy()
