"""Checkpoints on disk: a save that is interrupted leaves the last good one as it was."""

import os
from pathlib import Path
from typing import Any

import torch

from memplan.documents.writing import replacing
from memplan.muon.stores.optimizer_errors import OptimizerError

_PREFIX, _SUFFIX = "step-", ".pt"


def saved_checkpoint(content: Any, folder: str | os.PathLike[str], step: int, keep_last: int = 3) -> Path:
    """Save ``content`` as the checkpoint of ``step``, and delete all but the newest ``keep_last``.

    The file is written under another name, flushed to disk and renamed, which is one indivisible
    operation; older checkpoints are deleted only after that.

    Args:
        content: What ``torch.load(weights_only=True)`` can read, such as a ``state_dict``.
        folder: Created if missing.
        step: At least 0.
        keep_last: At least 1.

    Raises:
        OptimizerError: If a number is out of range.
    """
    if step < 0 or keep_last < 1:
        raise OptimizerError(f"expected step >= 0 and keep_last >= 1, got {step} and {keep_last}")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"{_PREFIX}{step:012d}{_SUFFIX}"
    with replacing(target) as file:
        torch.save(content, file)
    for old in checkpoints(root)[:-keep_last]:
        if old != target:
            old.unlink(missing_ok=True)
    return target


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest step first."""
    return sorted(Path(folder).glob(f"{_PREFIX}*{_SUFFIX}"))


def latest_checkpoint(folder: str | os.PathLike[str], map_location: str = "cpu") -> Any:
    """Return the content of the newest checkpoint in ``folder``.

    Raises:
        OptimizerError: If there is none.
    """
    saved = checkpoints(folder)
    if not saved:
        raise OptimizerError(f"no checkpoint in {folder}")
    return torch.load(saved[-1], weights_only=True, map_location=map_location)
