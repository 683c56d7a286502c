"""What stands for TRL's kernels of Triton on a device that is said to be CUDA's: they write into what they are given and allocate nothing."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import trl.trainer.utils as trl_utils

from memplan.errors import CannotAnswerError


def nothing(*_: Any, **__: Any) -> None:
    """Stand for a kernel that writes in place."""


class _Launched:
    """Stands for a Triton kernel: launched on a grid, it writes into what it is given."""

    def __getitem__(self, _: Any) -> Any:
        return nothing


def log_probability_kernels() -> list[tuple[Any, str, Any]]:
    """Return what stands for the kernel of log-probabilities over whole logits (trl/kernels/logprob_entropy.py, 1.14)."""
    if not find_spec("trl.kernels"):
        return []
    kernels = import_module("trl.kernels.logprob_entropy")
    launched = [(kernels, name, _Launched()) for name in ("_forward_kernel", "_backward_kernel")]
    return [*launched, (trl_utils, "_supports_trl_loss_kernel", lambda *_: True)]


def pair_kernels() -> list[tuple[Any, str, Any]]:
    """Return what stands for the kernel that pairs are compared with.

    Raises:
        CannotAnswerError: triton is missing, which declares it.
    """
    if not find_spec("triton"):
        raise CannotAnswerError("tracing TRL's loss over pairs needs triton: pip install triton==3.9.0")
    return log_probability_kernels()


def tile_kernels() -> list[tuple[Any, str, Any]]:
    """Return what stands for the kernels of the fused head, whose tiles log-probabilities are folded from (trl/kernels/chunked_logprob.py, 1.16)."""
    chunked_logprob = import_module("trl.kernels.chunked_logprob")
    return [
        (chunked_logprob, "_forward_tile", nothing),
        (chunked_logprob, "_backward_tile", nothing),
        (chunked_logprob, "_addmm_fp32", nothing),
        (trl_utils, "_use_triton", lambda _: True),
    ]


def divergence_kernels() -> list[tuple[Any, str, Any]]:
    """Return what stands for kernels of Triton that tiles of both models' logits are compared by, in place, and for products into them.

    Source:
        ``_project`` and ``_stats_kernel``, ``_jsd_kernel`` and ``_backward_kernel`` in trl/kernels/chunked_divergence.py (1.16.0).
    """
    tiles, loop = import_module("trl.kernels.chunked_divergence"), import_module("trl.trainer.distillation_trainer")
    names = ("_project", "_stats_tile", "_jsd_tile", "_backward_tile", "_addmm_fp32")
    return [*((tiles, name, nothing) for name in names), (loop, "_use_triton", lambda _: True)]
