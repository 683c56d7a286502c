"""What is changed in transformers, bitsandbytes, TRL, Triton and unsloth, so that their own code runs on tensors without memory.

``from_pretrained`` builds a model from its ``config.json`` and loads weights that have a shape and a dtype; what loading
does with them, quantising included, is transformers' own code. Kernels of bitsandbytes and of Triton (Liger's, TRL's, the
script's own) are not launched: what is allocated for them is. No row of an embedding is taken for untrained, which unsloth
would look for in the values of weights.

Source:
    transformers 5.23.0, modeling_utils.py (``_get_resolved_checkpoint_files``, ``_load_pretrained_model``);
    bitsandbytes 0.50.2, functional.py (``get_paged``, ``is_on_gpu``); trl 1.16.0, kernels/chunked_logprob.py;
    unsloth_zoo 2026.10.9, tokenizer_utils.py (``fix_untrained_tokens``).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, Request

import torch
from torch import Tensor

from memplan.dryrun.files.sandboxed_files import SandboxedFiles, prepared_rows
from memplan.dryrun.files.sandboxed_paths import make_folders
from memplan.dryrun.libraries.arrow_files import arrow_changes
from memplan.dryrun.libraries.changed_modules import Change, changed_when_imported
from memplan.dryrun.libraries.flash_attn_package import flash_attn_installed
from memplan.dryrun.libraries.trainer_calls import TrainerCalls
from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.terms.outcome import RefusedError
from memplan.errors import printable
from memplan.trace.pretended_cuda.bitsandbytes_layers import cuda_backend
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.pretended_cuda.idle_kernels import idle_launches

NO_FILE = "weights-without-memory.safetensors"


@contextmanager
def known_libraries(
    compute_capability: str,
    files: SandboxedFiles,
    values: KnownValues,
    notes: list[str],
    calls: TrainerCalls,
    computing_again: Callable[[Any], Any],
    kernels: str = "cuda",
) -> Iterator[None]:
    """Change the libraries that a script imports inside.

    Args:
        values: Forgets what a kernel of Triton's may have written.
        notes: Is told what stands for a library.
        calls: Is told which job a trainer runs.
        computing_again: Watches a function that runs layers again in backward.
        kernels: ``cpu`` where TRL is to find no Triton, as without a GPU.
    """
    with ExitStack() as stack:
        changes = (
            arrow_changes(files, stack)
            | _changes_of_torch(files, stack)
            | {
                "transformers.modeling_utils": lambda module: _without_weights(module, stack),
                "transformers.tokenization_utils_base": lambda module: _saved_below_python(module, files, stack),
                "transformers.trainer": lambda module: calls.watch(module, stack),
                "datasets.arrow_dataset": lambda module: _in_one_process(module, stack),
                "peft.tuners.boft.layer": lambda module: stack.enter_context(replaced(module, _OF_BOFT)),
                "bitsandbytes": lambda module: _quantised_on_the_gpu(module, stack),
                "pynvml": lambda module: stack.enter_context(replaced(module, _driver())),
                "triton": lambda _: stack.enter_context(idle_launches(values.forget_numbers)),
                "trl.kernels.chunked_logprob": lambda module: _silent(module, stack, kernels == "cuda"),
                "unsloth_zoo.tokenizer_utils": lambda module: stack.enter_context(
                    replaced(module, {"fix_untrained_tokens": lambda *_, **__: None})
                ),
                "unsloth_zoo.gradient_checkpointing": lambda module: stack.enter_context(
                    replaced(
                        module.UnslothCheckpointFunction,
                        {"apply": computing_again(module.UnslothCheckpointFunction.apply)},
                    )
                ),
                "trl.trainer.utils": lambda module: stack.enter_context(
                    replaced(module, {"_use_triton": lambda _: kernels == "cuda"})
                ),
            }
        )
        stack.enter_context(_whatever_is_imported(notes))
        stack.enter_context(flash_attn_installed(compute_capability, notes))
        stack.enter_context(changed_when_imported(changes))
        yield


def _changes_of_torch(files: SandboxedFiles, stack: ExitStack) -> dict[str, Change]:
    """Return what is called with each of torch's modules that is to be changed, by its name."""
    extensions = dict.fromkeys(("load", "load_inline"), _refused_extension)
    return {
        "torch.distributed.checkpoint": lambda module: stack.enter_context(replaced(module, files.of_parts(module))),
        "torch.distributed.optim.zero_redundancy_optimizer": lambda module: stack.enter_context(
            replaced(module, {"_broadcast_object": _of_other_ranks(module._broadcast_object)})
        ),
        "torch.utils.cpp_extension": lambda module: stack.enter_context(replaced(module, extensions)),
    }


@contextmanager
def _whatever_is_imported(notes: list[str]) -> Iterator[None]:
    """Change what torch and Python have themselves."""
    fetches = {"open": _fetching_nothing(OpenerDirector.open)}
    slow_path = {"get_fastpath_enabled": _slow_path(notes)}
    with replaced(torch.backends.mha, slow_path), replaced(OpenerDirector, fetches):
        yield


SLOW_PATH_NOTE = (
    "evaluation of torch's transformer layers runs operator by operator: their fused path (torch.backends.mha), which keeps less, "
    "is not known here"
)


def _slow_path(notes: list[str]) -> Callable[[], bool]:
    """Return what tells that transformer layers have no fused path; where they would take it, that is noted."""

    def enabled() -> bool:
        if not torch.is_grad_enabled() and SLOW_PATH_NOTE not in notes:
            notes.append(SLOW_PATH_NOTE)
        return False

    return enabled


def _driver() -> dict[str, Any]:
    """Return what NVIDIA's driver says of the pretended GPU (pynvml 13.0)."""

    def memory(*_: Any) -> Any:
        free, total = torch.cuda.mem_get_info()
        return SimpleNamespace(total=total, free=free, used=total - free)

    idle = dict.fromkeys(("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex"), lambda *_: None)
    return {
        **idle,
        "nvmlDeviceGetCount": torch.cuda.device_count,
        "nvmlDeviceGetName": lambda _: torch.cuda.get_device_name(),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=0, memory=0),
    }


def _of_other_ranks(alone: Callable[..., Any]) -> Callable[..., Any]:
    """Return what sends an object to all ranks, which one process alone cannot receive."""

    def sent(*args: Any, **options: Any) -> Any:
        if torch.distributed.get_world_size() > 1:
            raise RefusedError(
                "ZeroRedundancyOptimizer.consolidate_state_dict() gathers the states of other ranks, which are not here; leave it "
                "out for the dry run: what it takes is gone before the next step"
            )
        return alone(*args, **options)

    return sent


def _refused_extension(*_: Any, **__: Any) -> Any:
    raise RefusedError(
        "the script compiles an extension of its own, whose operators are not known here; give those that it calls a form "
        "without memory: torch.library.custom_op and register_fake"
    )


def _fetching_nothing(opens: Callable[..., Any]) -> Callable[..., Any]:
    """Return what opens files and what this machine serves, as torch.hub and torchvision's data sets ask for them, and fetches nothing."""

    def guarded(own: OpenerDirector, request: str | Request, *rest: Any, **options: Any) -> Any:
        address = request if isinstance(request, str) else request.full_url
        place = urlsplit(address)
        if place.scheme in ("http", "https", "ftp") and place.hostname not in ("localhost", "127.0.0.1", "::1"):
            raise RefusedError(
                f"the script fetches {printable(address)}, and nothing is fetched here: fetch it once beforehand, to where the "
                "script looks for it"
            )
        return opens(own, request, *rest, **options)

    return guarded


class _BlockDiagonal:
    """Stands for the extension that PEFT compiles for BOFT (``fbd_cuda_kernel.cu`` in peft/tuners/boft/fbd, 0.21.2)."""

    @staticmethod
    def forward(blocks: Tensor) -> list[Tensor]:
        """Return matrices, ``(factors, rows, rows)``, of blocks, ``(factors, blocks, rows, rows)``, along their diagonals."""
        factors, count, rows, _ = blocks.shape
        return [blocks.new_zeros((factors, count * rows, count * rows))]

    @staticmethod
    def backward(gradient: Tensor, blocks: Tensor) -> list[Tensor]:
        """Return the gradient of the blocks."""
        del gradient
        return [torch.zeros_like(blocks)]


_OF_BOFT = {"get_fbd_cuda": lambda: _BlockDiagonal}


def _without_weights(module: Any, stack: ExitStack) -> None:
    """Let ``from_pretrained`` find weights that have no values."""
    model_class = module.PreTrainedModel
    load = model_class._load_pretrained_model

    def loaded(model: Any, state_dict: Any, files: Any, *args: Any, **options: Any) -> Any:
        if state_dict is None and files == [NO_FILE]:
            state_dict, files = weights_of(model), None
        return load(model, state_dict, files, *args, **options)

    stack.enter_context(replaced(model_class, {"_load_pretrained_model": staticmethod(loaded)}))
    stack.enter_context(replaced(module, {"_get_resolved_checkpoint_files": lambda *_, **__: ([NO_FILE], None)}))
    read = module.load_state_dict

    def of_a_file(file: Any, *args: Any, **options: Any) -> Any:
        # Whose first weight tells the dtype where the config does not: fp32, as checkpoints have that are older than the key.
        return {"weight": torch.empty(1, device="meta")} if file == NO_FILE else read(file, *args, **options)

    stack.enter_context(replaced(module, {"load_state_dict": of_a_file}))


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint of a model holds, tied weights once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    dtype = getattr(model.config, "dtype", None) or torch.float32
    return {
        name: torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="cpu")
        for name, tensor in model.state_dict().items()
        if name not in tied and isinstance(tensor, Tensor)
    }


def _saved_below_python(module: Any, files: SandboxedFiles, stack: ExitStack) -> None:
    """Let tokenizers, which write their files in Rust, write where what a script writes is kept."""
    saved = module.PreTrainedTokenizerBase.save_pretrained

    def sandboxed(tokenizer: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        return saved(tokenizer, files.sandboxed_folder(save_directory), *args, **options)

    stack.enter_context(replaced(module.PreTrainedTokenizerBase, {"save_pretrained": sandboxed}))


def _in_one_process(module: Any, stack: ExitStack) -> None:
    """Let ``datasets`` work on rows in the script's own process, and write its cache."""
    make_folders(prepared_rows())

    def alone(function: Any) -> Any:
        @wraps(function)
        def called(*args: Any, num_proc: Any = None, **options: Any) -> Any:
            del num_proc
            return function(*args, **options)

        return called

    names = ("map", "filter")
    stack.enter_context(replaced(module.Dataset, {name: alone(getattr(module.Dataset, name)) for name in names}))


def _quantised_on_the_gpu(module: Any, stack: ExitStack) -> None:
    """Run bitsandbytes' kernels as its CUDA backend does; paged states are host memory, which it manages itself."""
    functional = module.functional
    stack.enter_context(cuda_backend())

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        del device
        state = torch.empty(shape, dtype=dtype, device="cpu")
        state.is_paged, state.page_deviceid = True, 0  # type: ignore[attr-defined]
        return state

    idle: Any = lambda *_, **__: None  # noqa: E731
    changes = {"get_paged": paged, "is_on_gpu": lambda _: True, "lib": _NativeKernels()}
    changes |= {"prefetch_tensor": idle, "_get_tensor_stream": idle}
    stack.enter_context(
        replaced(functional, {name: value for name, value in changes.items() if hasattr(functional, name)})
    )
    if update := getattr(torch.ops.bitsandbytes, "optimizer_update_32bit", None):  # no operation of older versions
        stack.enter_context(replaced(torch.ops.bitsandbytes, {update.__name__: _ToldNorm(update)}))


class _ToldNorm:
    """The update in 32 bits, whose norm of weights (LAMB, LARS) is a tensor, of which torch reads the number (functional.py)."""

    def __init__(self, update: Any) -> None:
        self._update = update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._update, name)

    def __call__(self, *args: Any) -> None:
        self._update(*args[:7], float(args[7]), *args[8:])


class _NativeKernels:
    """Stands for bitsandbytes' compiled library, as other libraries call it by ctypes: each kernel writes into what it is given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _IdleKernel()


class _IdleKernel:
    restype = argtypes = None

    def __call__(self, *_: Any) -> None:
        """Launch nothing."""


def _silent(module: Any, stack: ExitStack, has_triton: bool) -> None:
    """Launch no Triton kernel: each writes into what it is given; where there is no Triton, all runs in torch's operators."""
    if not has_triton:
        stack.enter_context(replaced(module, {"_use_triton": lambda _: False}))
        return
    names = ("_forward_tile", "_backward_tile", "_addmm_fp32")
    idle: Any = lambda *_, **__: None  # noqa: E731
    stack.enter_context(replaced(module, dict.fromkeys([name for name in names if hasattr(module, name)], idle)))
