"""Data loaders of a script: they load in its own process, and give rows of the length that is asked for."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from memplan.dryrun.terms.outcome import RefusedError, StepsDoneError
from memplan.trace.pretended_cuda.fake_devices import replaced


@contextmanager
def data_loaders(tokens: int | None = None) -> Iterator[None]:
    """Load data in this process, into ordinary memory: workers and pinned pages are no memory of the GPU's.

    Args:
        tokens: Length of the rows that loaders give in the place of their own; None for their own.

    Raises:
        RefusedError: The script took its steps, and no loader gave rows that have a length.
    """
    original, rows_of = DataLoader.__init__, DataLoader.__iter__
    lengthened = tokens is None
    done: StepsDoneError | None = None

    def made(loader: Any, *args: Any, **options: Any) -> None:
        options |= {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        for name in ("multiprocessing_context", "timeout"):  # of workers alone
            options.pop(name, None)
        original(loader, *args, **options)

    def full(loader: Any) -> Iterator[Any]:
        nonlocal lengthened
        assert tokens is not None
        for batch in rows_of(loader):
            rows = stretched(batch, loader.batch_size, tokens)
            lengthened = lengthened or rows is not batch
            yield rows

    with replaced(DataLoader, {"__init__": made, **({} if tokens is None else {"__iter__": full})}):
        try:
            yield
        except StepsDoneError as error:
            done = error
    if not lengthened:
        raise RefusedError("no DataLoader of the script gave rows of tokens to lengthen; leave --synthetic out")
    if done is not None:
        raise done


def stretched(batch: Any, rows: int | None, tokens: int) -> Any:
    """Return a batch made full: its ids, labels and masks (rows, tokens) are repeated, and of all else with as many rows the rows.

    Args:
        batch: A tensor, or a mapping or sequence of them; itself is returned where nothing in it is of tokens.
        rows: Of a full batch; None for as many as there are.
        tokens: Of a full row.
    """
    given = next((len(value) for value in _tensors(batch) if _is_of_tokens(value)), 0)
    lines = torch.arange(rows or given) % max(given, 1)

    def full(value: Tensor) -> Tensor:
        if value.dim() == 0 or len(value) != given:
            return value
        whole = value[lines]
        return whole[:, torch.arange(tokens) % value.shape[1]] if _is_of_tokens(value) else whole

    return _each(batch, full) if given else batch


def _is_of_tokens(value: Tensor) -> bool:
    return value.dim() == 2 and not value.is_floating_point() and value.numel() > 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _each(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        parts = {name: _each(item, function) for name, item in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        items = [_each(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
