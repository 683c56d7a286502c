"""A real training step on tensors without memory: reference models, other libraries, tracing."""

from memplan.host.this_machine import ignore_missing_numpy

ignore_missing_numpy()
