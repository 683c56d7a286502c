"""One colour for each component, in every picture, page and notebook."""

from __future__ import annotations

from collections.abc import Mapping

COLOURS: Mapping[str, str] = {
    "weights": "#0072b2",
    "master_weights": "#56b4e9",
    "gradients": "#e69f00",
    "optimizer_states": "#009e73",
    "buffers": "#999999",
    "activations": "#f0e442",
    "logits": "#cc79a7",
    "temporaries": "#d55e00",
    "communication": "#000000",
    "library_workspaces": "#666666",
    "allocator_reserve": "#c8c8c8",
    "device_context": "#7f8fa6",
    "nccl_buffers": "#4b5d73",
    "generation_engine": "#332288",
}
"""Colours that remain distinct without red-green vision (Okabe and Ito, https://jfly.uni-koeln.de/color/); greys lie outside
what tensors make up."""
