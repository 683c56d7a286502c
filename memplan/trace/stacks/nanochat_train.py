"""nanochat's own model and optimizer in the loop of its base_train.py, compiled as there; a checkout of it has to be on PYTHONPATH.

FlashAttention-3, which nanochat loads from a hub on a card of compute capability 9.0, is told anew without memory.

Source:
    scripts/base_train.py of https://github.com/karpathy/nanochat (92d63d4e); ``_flash_attn_forward``, ``_flash_attn_backward`` and
    ``_backward`` in hopper/flash_attn_interface.py of https://github.com/Dao-AILab/flash-attention (01afd16d).
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module, reload
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, ModelSpec
from memplan.step.compiled.compiled_nanochat import is_nanochat, refuse_other_jobs
from memplan.trace.compiled.compiler import COMPILED_NOTE, pretended_compiler
from memplan.trace.pretended_cuda.composite_kernels import composite_kernels
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.stacks.registry import STEPS, StackInputs, StackRun
from memplan.trace.stacks.watched_parts import watch_states, watch_tensors
from memplan.training.resolved import TrainingSetup
from memplan.units import round_up

PACKAGES = ()
FLASH_3 = "9.0"
"""Compute capability that FlashAttention-3 runs on."""


@torch.library.custom_op("memplan::flash_3", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention of ``(batch, tokens, heads, width)``, and its statistics."""
    raise NotImplementedError


@_attend.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    return torch.empty_like(value), query.new_empty((batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op("memplan::flash_3_backward", mutates_args=("query_gradient", "key_gradient", "value_gradient"))
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    statistics: Tensor,
    query_gradient: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
) -> Tensor:
    """Write three gradients; return a sum for each row."""
    raise NotImplementedError


@_attend_backward.register_fake
def _(_gradient: Tensor, query: Tensor, *_others: Any) -> Tensor:
    batch, tokens, heads, _ = query.shape
    return query.new_empty((batch, heads, round_up(tokens, 128)), dtype=torch.float32)


def _saves(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    saved = ctx.saved_tensors
    gradients = [torch.empty_like(x) for x in saved[:3]]
    _attend_backward(gradient, *saved, *gradients)
    return tuple(gradients)


_attend.register_autograd(_backward, setup_context=_saves)


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run nanochat's loop on the model that the inputs ask for.

    Raises:
        CannotAnswerError: Another model or setup, or no checkout of nanochat.
    """
    setup, spec = inputs.setup, inputs.model.spec
    if not is_nanochat(spec):
        raise CannotAnswerError("nanochat trains its own model")
    refuse_other_jobs(setup)
    with ExitStack() as stack:
        stack.enter_context(_rank(inputs.details.rank, setup.config.parallel.data))
        stack.enter_context(composite_kernels(inputs.compute_capability))
        stack.enter_context(pretended_compiler(inputs.compute_capability))
        gpt = stack.enter_context(_own_code(inputs.compute_capability))
        with torch.device("meta"):
            model = gpt.GPT(_config(gpt, spec, setup))
        model.init_weights()
        optimizer = model.setup_optimizer()
        watch_tensors(model, recorder)
        with AnyNumber(), recorder:  # type: ignore[no-untyped-call]
            _loop(torch.compile(model, dynamic=False), optimizer, setup, recorder)
    return StackRun("nanochat's own model and optimizer, its loop told anew", spec.vocab_size, (COMPILED_NOTE,))


def _config(gpt: Any, spec: ModelSpec, setup: TrainingSetup) -> Any:
    """Return the config of nanochat's model."""
    heads, last = spec.runs[0].layer.attention, spec.num_hidden_layers - 1
    assert isinstance(heads, Attention)
    full = range(last + 1) if not spec.window else spec.full_layers
    pattern = "".join("L" if layer in full else "S" for layer in range(last + 1))
    return gpt.GPTConfig(
        sequence_len=setup.config.sequence_length,
        vocab_size=spec.vocab_size - spec.cut_words,
        n_layer=spec.num_hidden_layers,
        n_head=heads.num_heads,
        n_kv_head=heads.num_key_value_heads,
        n_embd=spec.hidden_size,
        window_pattern=pattern,
    )


@contextmanager
def _own_code(compute_capability: str) -> Iterator[Any]:
    """Yield nanochat's module of its model; all are loaded anew, since they compile functions as they are imported."""
    with patch.dict(os.environ, {"NANOCHAT_DTYPE": "bfloat16"}):
        try:
            modules = [
                reload(import_module(f"nanochat.{name}")) for name in ("common", "flash_attention", "optim", "gpt")
            ]
        except ImportError as error:
            raise CannotAnswerError(
                f"tracing stack nanochat runs its own code, which is no package: put a checkout of it on PYTHONPATH ({error})"
            ) from None
    flash_3 = SimpleNamespace(flash_attn_func=lambda query, key, value, **_: _attend(query, key, value)[0])
    with patch.multiple(modules[1], USE_FA3=compute_capability == FLASH_3, _fa3=flash_3):
        yield modules[-1]


@contextmanager
def _rank(rank: int, ranks: int) -> Iterator[None]:
    """Let nanochat find itself one of several processes, which torchrun tells by the environment."""
    if ranks == 1:
        yield
        return
    dist.init_process_group("cpu:fake,meta:fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}):
            yield
    finally:
        dist.destroy_process_group()


def _loop(model: Any, optimizer: Any, setup: TrainingSetup, recorder: Recorder) -> None:
    """Train as base_train.py does; the next micro-batch is copied into the buffer of this one."""
    config = setup.config
    buffer = torch.zeros(2, config.micro_batch_size, config.sequence_length, dtype=torch.long, device="meta")
    x, y = buffer[0], buffer[1]
    steps = config.gradient_accumulation_steps
    for _ in range(STEPS):
        recorder.next_step()
        for micro_step in range(steps):
            recorder.instant("forward", later=micro_step > 0)
            recorder.forward_begins()
            loss = model(x, y)
            train_loss = loss.detach()
            loss = loss / steps
            recorder.forward_ends()
            recorder.instant("loss backward", backward=True, later=micro_step > 0)
            loss.backward()
        recorder.instant("optimizer step")
        optimizer.step()
        watch_states(optimizer, recorder)
        model.zero_grad(set_to_none=True)
        train_loss.item()
