"""What ``torch.cuda.get_device_properties`` returns of the pretended card: what is known of it, and what nobody here knows."""

from types import SimpleNamespace
from typing import Any

from memplan.dryrun.terms.outcome import RefusedError

_NOT_KNOWN = frozenset(
    {
        "L2_cache_size",
        "clock_rate",
        "max_threads_per_multi_processor",
        "memory_bus_width",
        "memory_clock_rate",
        "shared_memory_per_block",
        "shared_memory_per_block_optin",
        "shared_memory_per_multiprocessor",
        "uuid",
    }
)
"""What torch tells of a card besides (``_CudaDeviceProperties`` in torch/_C/__init__.pyi, v2.13.0), and nobody here knows."""


class _NotKnownHere:
    """Stands for what torch tells of a card and nobody here knows: it can be looked for and printed; a use of it ends the run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refused(self, *_: Any) -> Any:
        raise RefusedError(f"{self._name} of the card's properties is asked for, which is not known here")

    def __repr__(self) -> str:
        return "not known"

    def __hash__(self) -> int:
        return hash(self._name)

    __int__ = __index__ = __float__ = __bool__ = __len__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _refused
    )
    __add__ = __sub__ = __mul__ = __floordiv__ = __truediv__ = __mod__ = __neg__ = _refused
    __radd__ = __rsub__ = __rmul__ = __rfloordiv__ = __rtruediv__ = __rmod__ = _refused


class CardProperties(SimpleNamespace):
    """What torch tells of a card."""

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_KNOWN:
            return _NotKnownHere(name)
        raise AttributeError(name)
