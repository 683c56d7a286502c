"""torch as it is installed here, or is not: what it says at import, and what cannot be done without it."""

from __future__ import annotations

import warnings

from memplan.errors import CannotAnswerError

WITHOUT_NUMPY = r"Failed to initialize NumPy: No module named 'numpy'"
"""numpy is no dependency of torch, and nothing here turns tensors into arrays. Where numpy is installed and fails,
the message is another one, and is shown.
Source: torch/csrc/utils/tensor_numpy.cpp (v2.13.0), is_numpy_available
"""


def ignore_missing_numpy() -> None:
    """Ignore that there is no numpy, even where warnings are errors: importing torch would then fail."""
    warnings.filterwarnings("ignore", message=WITHOUT_NUMPY, category=UserWarning)


def require_torch(doing: str = "tracing") -> None:
    """Refuse what cannot be done without torch.

    Raises:
        CannotAnswerError: It is not installed.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise CannotAnswerError(
            f"{doing} needs torch, which is not installed: pip install '.[torch]' in a checkout of memplan"
        )
