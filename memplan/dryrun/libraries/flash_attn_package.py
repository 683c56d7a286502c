"""The package ``flash_attn`` for a script that imports it: its functions, whose kernels are on the pretended card.

It cannot be installed where there is no CUDA, and stands here for one that is. Its kernels of lengths that vary, packed
tensors and padding are there; its layers, losses and norms are not, and are refused by name.

Source:
    flash_attn/__init__.py, flash_attn_interface.py and bert_padding.py of Dao-AILab/flash-attention (2.8).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from memplan.dryrun.terms.outcome import RefusedError
from memplan.errors import CannotAnswerError
from memplan.trace.pretended_cuda.flash_attention_2 import AttentionLengths, attended, flash_attn_func

PACKAGE, VERSION = "flash_attn", "2.8.3"
FIRST_CAPABILITY = 8
"""Of Ampere, the first cards that it runs on (flash_api.cpp, ``mha_fwd``)."""


_OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
_OF_TWO = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _attention(name: str, tensors: tuple[str, ...], lengths: tuple[str, ...] = (), **more: Any) -> Callable[..., Any]:
    """Return a function of the package's, which tells of attention and does none.

    Args:
        tensors: Its first arguments: queries, keys and values, ``(batch, tokens, heads, width)`` each, or packed, with their
            number before the heads; without the batch where they lie one behind another.
        lengths: The next, where sequences do: where they begin, of queries and of keys, and the tokens of the longest.
        more: Options that it alone has.
    """
    kind = Parameter.POSITIONAL_OR_KEYWORD
    required = [Parameter(key, kind) for key in (*tensors, *lengths)]
    signature = Signature(
        [*required, *(Parameter(key, kind, default=value) for key, value in {**_OPTIONS, **more}.items())]
    )

    def attention(*args: Any, **options: Any) -> Any:
        said = signature.bind(*args, **options)
        said.apply_defaults()
        given, values = tuple(said.arguments[key] for key in tensors), said.arguments
        bounds = [values[key] for key in lengths if key.startswith("cu_")]
        longest = [int(values[key]) for key in lengths if key.startswith("max_")]
        longest = longest or [given[0].shape[1], given[-1].shape[1]]
        apart = AttentionLengths(
            (bounds[0], bounds[-1]) if bounds else (),
            (longest[0], longest[-1]),
            values["dropout_p"] > 0,
            values["return_attn_probs"],
        )
        return attended(apart, given, deterministic=values["deterministic"])

    attention.__name__, attention.__signature__ = name, signature  # type: ignore[attr-defined]
    return attention


def flash_attn_with_kvcache(q: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return attention to what a cache holds; nothing is kept for backward."""
    return torch.empty_like(q)


class _Rows(torch.autograd.Function):
    """``IndexFirstAxis``: some rows of a tensor."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        """Return the rows ``(chosen, ...)`` of a tensor ``(rows, ...)``."""
        tensor, indices = given
        ctx.save_for_backward(indices)
        ctx.rows = len(tensor)
        flat = tensor.reshape(len(tensor), -1)
        chosen = torch.gather(flat, 0, indices[:, None].expand(-1, flat.shape[1]))
        return chosen.reshape(-1, *tensor.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return zeros with the gradient in the rows that were chosen."""
        (indices,), shape = ctx.saved_tensors, gradients[0].shape[1:]
        flat = gradients[0].reshape(len(gradients[0]), -1)
        formed = flat.new_zeros((ctx.rows, flat.shape[1]))
        formed.scatter_(0, indices[:, None].expand(-1, flat.shape[1]), flat)
        return formed.reshape(ctx.rows, *shape), None


class _PutRows(torch.autograd.Function):
    """``IndexPutFirstAxis``: a tensor of zeros but for some rows."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Return a tensor ``(rows, ...)`` that has the values ``(chosen, ...)``."""
        values, indices, rows = given
        ctx.save_for_backward(indices)
        out: Tensor = values.new_zeros((rows, *values.shape[1:]))
        out[indices] = values
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the rows of the gradient that were put."""
        (indices,) = ctx.saved_tensors
        return gradients[0][indices], None, None


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None) -> tuple[Any, ...]:
    """Return the tokens that a mask holds, one behind another, with where they were and where sequences begin."""
    whole = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = whole.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(whole.flatten(), as_tuple=False).flatten()
    bounds = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    tokens = _Rows.apply(hidden_states.flatten(0, 1), indices)  # type: ignore[no-untyped-call]
    return tokens, indices, bounds, lengths.max().item(), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return tokens where they were before :func:`unpad_input`, with zeros between them."""
    put: Tensor = _PutRows.apply(hidden_states, indices, batch * seqlen)  # type: ignore[no-untyped-call]
    return put.reshape(batch, seqlen, *put.shape[1:])


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    flash_attn_func,
    _attention("flash_attn_varlen_func", ("q", "k", "v"), _OF_TWO, block_table=None),
    _attention("flash_attn_qkvpacked_func", ("qkv",)),
    _attention("flash_attn_kvpacked_func", ("q", "kv")),
    _attention("flash_attn_varlen_qkvpacked_func", ("qkv",), ("cu_seqlens", "max_seqlen")),
    _attention("flash_attn_varlen_kvpacked_func", ("q", "kv"), _OF_TWO),
    flash_attn_with_kvcache,
)
PADDING: dict[str, Any] = {
    "unpad_input": unpad_input,
    "pad_input": pad_input,
    "index_first_axis": _Rows.apply,
    "index_put_first_axis": _PutRows.apply,
}


class _Installed(Distribution):
    """What tells libraries that the package is installed."""

    def read_text(self, filename: str) -> str | None:
        """Return a file of the package's metadata."""
        metadata = f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
        return {"METADATA": metadata, "top_level.txt": f"{PACKAGE}\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return where a file would lie."""
        return Path(PACKAGE) / path


class _Finder:
    """Finds the package, and refuses what of it is not here."""

    def __init__(self, compute_capability: str) -> None:
        self._major = int(compute_capability.split(".")[0])
        self.used = False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the spec of the package or of a module in it.

        Raises:
            RefusedError: Another module of it.
        """
        if name.partition(".")[0] != PACKAGE or name.startswith(
            f"{PACKAGE}.cute"
        ):  # that is flash-attn-4's, not installed
            return None
        if name not in _CONTENTS:
            raise RefusedError(
                f"{name} is not modelled, of flash_attn only its functions of attention and bert_padding are"
            )
        return ModuleSpec(name, self, is_package=name == PACKAGE)  # type: ignore[arg-type]

    def find_distributions(self, context: Any) -> Iterator[Distribution]:
        """Yield the package's, where it or any is looked for."""
        if context.name is None or context.name.lower().replace("-", "_") == PACKAGE:
            yield _Installed()

    def create_module(self, spec: ModuleSpec) -> None:
        """Return nothing, so that Python makes the module."""
        del spec

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module."""
        self.used = True
        for name, function in _CONTENTS[module.__name__].items():
            own = self._checked(function) if function in FUNCTIONS else function
            setattr(module, name, own)
        if module.__name__ == PACKAGE:
            module.__version__ = VERSION  # type: ignore[attr-defined]

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that raises what the kernels raise, stops what is not modelled, and says what arguments it takes."""

        @wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            if self._major < FIRST_CAPABILITY:
                raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
            first: Tensor = args[0] if args else options["q" if "q" in options else "qkv"]
            if first.dtype not in (torch.float16, torch.bfloat16):
                raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
            try:
                return function(*args, **options)
            except CannotAnswerError as error:
                raise RefusedError(str(error)) from None

        return checked


class _Kernels:
    """Stands for the compiled module, whose presence libraries look for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RefusedError(f"flash_attn's compiled {name} is not modelled, its functions of attention are")


_ATTENTION = {function.__name__: function for function in FUNCTIONS}
_CONTENTS: dict[str, dict[str, Any]] = {
    PACKAGE: _ATTENTION,
    f"{PACKAGE}.flash_attn_interface": {**_ATTENTION, "flash_attn_gpu": _Kernels()},
    f"{PACKAGE}.bert_padding": PADDING,
}


@contextmanager
def flash_attn_installed(compute_capability: str, notes: list[str]) -> Iterator[None]:
    """Let a script find flash-attn 2 where it looks for it.

    Args:
        notes: Is told when a script has imported it.
    """
    finder = _Finder(compute_capability)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        if finder.used:
            notes.append(
                f"flash_attn is taken for installed ({VERSION}): its kernels' memory is counted, and none is run"
            )
