"""Reproduction and exploration: experiments, training runs, and formula against trace."""

from memplan.host.torch_warnings import ignore_missing_numpy

ignore_missing_numpy()
