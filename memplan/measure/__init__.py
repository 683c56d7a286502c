"""A real training step on a real device, in a process of its own, and the records of it."""

from memplan.host.this_machine import ignore_missing_numpy

ignore_missing_numpy()
