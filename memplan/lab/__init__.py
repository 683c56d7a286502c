"""The laboratory: reference models, tracing, measuring. Torch is imported here and in ``memplan.muon`` only."""

from memplan.torch_warnings import ignore_missing_numpy

ignore_missing_numpy()
