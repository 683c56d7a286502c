"""The bundled Muon: quantised momentum, trained quantised weights, and bytes that can be named."""

# ruff: noqa: E402 (the filter has to be there before torch is)
from memplan.host.this_machine import ignore_missing_numpy

ignore_missing_numpy()

from memplan.muon.byte_model import PredictedBytes, predict_bytes, predict_optimizer_bytes
from memplan.muon.checkpoints import latest_checkpoint, saved_checkpoint
from memplan.muon.optimizer import Muon
from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_, newton_schulz_workspace_bytes
from memplan.muon.parameter_groups import split_parameters
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.weights.quantised import QuantisedWeight
from memplan.muon.weights.quantised_layers import QuantisedEmbedding, QuantisedLinear, quantise_

__all__ = [
    "Muon", "OptimizerError", "PredictedBytes", "QuantisedEmbedding", "QuantisedLinear", "QuantisedWeight",
    "latest_checkpoint", "newton_schulz_", "newton_schulz_workspace_bytes", "predict_bytes",
    "predict_optimizer_bytes", "quantise_", "saved_checkpoint", "split_parameters",
]  # fmt: skip
