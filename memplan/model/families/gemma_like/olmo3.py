"""OLMo 3: OLMo 2's layers, of which three of four look back through a window and have rotary tables of their own.

Source: ``transformers/models/olmo3/modeling_olmo3.py``.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.model.families.common_parts import sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.llama_like import olmo2
from memplan.model.spec import ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of an OLMo 3 config."""
    spec = olmo2.model_spec(config)
    return replace(spec, rotary_tables=2, **sliding_window(config, spec.num_hidden_layers))
