"""Trace a user's module, or the real implementation behind a ``config.json``."""

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memplan.errors import CannotAnswerError, MemplanError
from memplan.trace.jobs.bundled_optimizer import short_loops
from memplan.trace.jobs.module_job import ModuleJob
from memplan.trace.jobs.optimizers import cuda_optimizer_paths
from memplan.trace.jobs.reference_job import skipped_files
from memplan.trace.pretended_cuda.cuda_kernels import cuda_kernels
from memplan.trace.recording.assembly import assembled
from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.trace_result import Trace
from memplan.trace.recording.valueless_tensors import without_memory
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.resolved import TrainingSetup

_DATA_DEPENDENT = re.compile(
    r"item\(\)|meta tensors|no data|nonzero|data-dependent|Cannot copy out of meta", re.IGNORECASE
)

Factory = Callable[[], nn.Module]


def imported_factory(name: str) -> Factory:
    """Return the function that ``package.module:factory`` names.

    Raises:
        CannotAnswerError: There is no such module or function, or importing it fails.
    """
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        raise CannotAnswerError(f"{name!r} is not a factory: write package.module:function")
    try:
        imported: Any = import_module(module)
        for part in attribute.split("."):
            imported = getattr(imported, part)
    except Exception as error:
        raise CannotAnswerError(f"cannot import {name}: {_one_line(error)}; check the name and PYTHONPATH") from error
    if not callable(imported):
        raise CannotAnswerError(f"{name} is not callable: it must take no arguments and return a torch.nn.Module")
    factory: Factory = imported
    return factory


def trace_module(factory: str | Factory, setup: TrainingSetup) -> Trace:
    """Return the trace of a training step of the module that ``factory`` builds.

    The module is built on ``meta``: nothing is allocated and nothing initialised. Its forward
    returns a scalar loss, or logits (batch, tokens, vocabulary), from which the loss is taken.

    Args:
        factory: Takes no arguments and returns the module; or its name, ``package.module:function``.
        setup: The training setup; its float formats become the dtype of the parameters.

    Raises:
        CannotAnswerError: The module cannot be imported, built, or run without the values of tensors.
    """
    build = imported_factory(factory) if isinstance(factory, str) else factory
    label = factory if isinstance(factory, str) else getattr(factory, "__name__", "the factory")
    with _explained(f"building {label}"), without_memory():
        module = build()
    if not isinstance(module, nn.Module):
        raise CannotAnswerError(f"{label} returned {type(module).__name__}, not a torch.nn.Module")
    _to_dtype(module, setup)
    ids = torch.zeros(setup.config.micro_batch_size, setup.config.sequence_length, dtype=torch.long, device="meta")
    return _traced(ModuleJob(module, setup, {_first_argument(module): ids}, torch.zeros_like(ids)), setup, label)


def trace_huggingface(directory: str | Path, setup: TrainingSetup) -> Trace:
    """Return the trace of transformers' own implementation of the ``config.json`` in ``directory``.

    Args:
        directory: Holds a ``config.json``; weights are neither needed nor read.

    Raises:
        CannotAnswerError: transformers is missing, does not know the architecture, or its
            implementation needs the values of tensors.
    """
    try:
        from memplan.trace.transformers_models import causal_model, without_packing
    except ImportError as error:
        raise CannotAnswerError(
            "transformers is not installed: pip install '.[hf]' in a checkout of memplan"
        ) from error
    with _explained(f"building the model of {directory}"), without_memory():
        module = causal_model(Path(directory), setup)
    _to_dtype(module, setup)
    ids = torch.zeros(setup.config.micro_batch_size, setup.config.sequence_length, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "labels": torch.zeros_like(ids), "use_cache": False}
    job = ModuleJob(module, setup, inputs, ids, vocab_size=int(module.config.get_text_config().vocab_size))
    with without_packing():
        return _traced(job, setup, type(module).__name__)


def _traced(job: ModuleJob, setup: TrainingSetup, label: str) -> Trace:
    recorder = Recorder("meta", (__file__, *skipped_files(), *_own_files()))
    job.watch(recorder)
    compute = TORCH_DTYPES[setup.config.compute_dtype] if setup.autocast else None
    what = f"forward or backward of {label}"
    with (
        _explained(what),
        cuda_kernels(setup.profile, compute, setup.wide_attention),
        cuda_optimizer_paths(),
        short_loops(),
        recorder,
    ):
        for _ in range(2):
            recorder.next_step()
            job.step(recorder)
    return assembled(recorder, job.vocab_size, job.notes)


def _own_files() -> tuple[str, ...]:
    from memplan.trace.jobs import module_job
    from memplan.trace.pretended_cuda import cuda_kernels

    return (str(cuda_kernels.__file__), str(module_job.__file__))


def _first_argument(module: nn.Module) -> str:
    from inspect import signature

    names = list(signature(module.forward).parameters)
    if not names:
        raise CannotAnswerError(f"{type(module).__name__}.forward takes no arguments, so it cannot be given token ids")
    return names[0]


def _to_dtype(module: nn.Module, setup: TrainingSetup) -> None:
    """Give the parameters the dtype of hidden matrices."""
    name = setup.format_names["hidden_matrix"]
    if name not in TORCH_DTYPES or setup.config.adapter is not None:
        what = "adapters" if setup.config.adapter is not None else f"weights in {name}"
        raise CannotAnswerError(f"{what} are traced on catalog models only; other modules train float weights")
    module.to(TORCH_DTYPES[name])
    module.train()


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn any failure of a user's code into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MemplanError:
        raise
    except Exception as error:
        suggestion = "run it once on a small real batch to see whether the module itself is at fault"
        if isinstance(error, NotImplementedError) or _DATA_DEPENDENT.search(str(error)):
            suggestion = "it needs the values of a tensor, and a trace has only shapes: make that step depend on shapes"
        raise CannotAnswerError(f"{what} failed{_place(error)}: {_one_line(error)}; {suggestion}") from error


def _place(error: BaseException) -> str:
    """Return `` at file:line`` of the innermost frame that is not torch's or ours."""
    own = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((torch.__path__[0], own, "<"))]
    return f" at {Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:200]}"
