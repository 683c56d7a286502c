"""Data loaders of a script: they load in its own process, and give rows of the length that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from memplan.trace.pretended_cuda.fake_devices import replaced


@contextmanager
def data_loaders(tokens: int | None = None) -> Iterator[None]:
    """Load data in this process, into ordinary memory: workers and pinned pages are no memory of the GPU's.

    Args:
        tokens: Length of the rows that loaders give in the place of their own; None for their own.
    """
    original, rows_of = DataLoader.__init__, DataLoader.__iter__

    def made(loader: Any, *args: Any, **options: Any) -> None:
        options |= {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        options.pop("multiprocessing_context", None)
        original(loader, *args, **options)

    def full(loader: Any) -> Iterator[Any]:
        assert tokens is not None
        for batch in rows_of(loader):
            yield stretched(batch, loader.batch_size, tokens)

    with replaced(DataLoader, {"__init__": made, **({} if tokens is None else {"__iter__": full})}):
        yield


def stretched(value: Any, rows: int | None, tokens: int) -> Any:
    """Return a batch with its ids, labels and masks (rows, tokens) repeated to so many rows and tokens, all else as it is.

    Args:
        value: A tensor, or a mapping or sequence of them.
        rows: Of a full batch; None for as many as there are.
        tokens: Of a full row.
    """
    if isinstance(value, Tensor):
        if value.dim() != 2 or value.is_floating_point() or not value.numel():
            return value
        lines = torch.arange(rows or len(value)) % len(value)
        return value[lines][:, torch.arange(tokens) % value.shape[1]]
    if isinstance(value, Mapping):
        parts = {name: stretched(item, rows, tokens) for name, item in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        items = [stretched(item, rows, tokens) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
