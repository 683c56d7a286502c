"""Warnings of torch at import that do not concern memplan."""

from __future__ import annotations

import warnings

WITHOUT_NUMPY = r"Failed to initialize NumPy: No module named 'numpy'"
"""numpy is no dependency of torch, and nothing here turns tensors into arrays. Where numpy is installed and fails,
the message is another one, and is shown.
Source: torch/csrc/utils/tensor_numpy.cpp (v2.13.0), is_numpy_available
"""


def ignore_missing_numpy() -> None:
    """Ignore that there is no numpy, even where warnings are errors: importing torch would then fail."""
    warnings.filterwarnings("ignore", message=WITHOUT_NUMPY, category=UserWarning)
