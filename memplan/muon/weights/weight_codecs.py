"""The weight formats by name, with the layouts of the catalog's entries of the same names."""

from __future__ import annotations

from importlib import import_module

from memplan.muon.stores.optimizer_errors import unknown_choice
from memplan.muon.weights.iq_formats import Iq2S, Iq2Xs, Iq2Xxs, Iq3Xxs
from memplan.muon.weights.weight_formats import Q8Format, UniformFormat, WeightFormat

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    "q8-0": Q8Format("q8-0", 32, 34),
    "q4-0": UniformFormat("q4-0", 32, 18),
    "q5-0": UniformFormat("q5-0", 32, 22, bits=5),
    "q5-b64": UniformFormat("q5-b64", 64, 42, bits=5),
    "q6-b64": UniformFormat("q6-b64", 64, 50, bits=6),
    "iq3-xxs": Iq3Xxs("iq3-xxs", 256, 98, group=4, sub=32, factor=0.5),
    "iq2-xxs": Iq2Xxs("iq2-xxs", 256, 66),
    "iq2-xs": Iq2Xs("iq2-xs", 256, 74, sub=16),
    "iq2-s": Iq2S("iq2-s", 256, 82, sub=16, even_signs=False),
}


def weight_format(name: str) -> WeightFormat:
    """Return a weight format: one of ``WEIGHT_FORMATS``, or one of your own by its path, ``package.module.NAME``.

    Raises:
        UnknownNameError: If there is none.
    """
    if name in WEIGHT_FORMATS:
        return WEIGHT_FORMATS[name]
    module, _, last = name.rpartition(".")
    try:
        own = getattr(import_module(module), last) if module else None
    except (ImportError, AttributeError):
        own = None
    if not isinstance(own, WeightFormat):
        raise unknown_choice("weight format", name, WEIGHT_FORMATS)
    return own
