"""The device to train on."""

from __future__ import annotations

import torch

from memplan.errors import CannotAnswerError


def prepare(device: str, threads: int = 0) -> None:
    """Make sure that there is such a device, and take so many threads of the CPU; 0 leaves torch's choice.

    Raises:
        CannotAnswerError: torch sees no such device.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise CannotAnswerError("--device cuda: torch sees no CUDA device")
    if threads:
        torch.set_num_threads(threads)
