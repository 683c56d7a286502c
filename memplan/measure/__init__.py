"""A real training step on a real device, in a process of its own, and the records of it."""

from memplan.host.installed_torch import ignore_missing_numpy

ignore_missing_numpy()
