"""axolotl's model on Trainer's loop: its dtypes, and its own functions for projections with adapters.

Those functions are axolotl's; the kernels that they launch on a card (Triton's for the activation, bitsandbytes' for decoding
4 bits) are stood in for by what they allocate.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate.accelerator
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.utils import parametrize

from memplan.catalog.kernel_profiles import ADAPTED
from memplan.errors import CannotAnswerError
from memplan.step.states.parallel_shards import is_sharded
from memplan.trace.pretended_cuda.bitsandbytes_layers import quant_state, quantised, quantises
from memplan.trace.ranks.deepspeed_engine import deepspeed_ranks
from memplan.trace.recording.recorder import Recorder
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.huggingface.built_model import loaded_model, with_adapters
from memplan.trace.stacks.huggingface.trainer_loop import Rows, collated, pretended_machine, trained, training_arguments
from memplan.trace.stacks.registry import StackInputs, StackRun
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.method_rules import REFERRED
from memplan.units import ceil_div

PACKAGES = ("axolotl", "transformers", "peft", "accelerate", "bitsandbytes", "triton")
EMBEDDINGS = ("embed_tokens", "lm_head")
"""What its loader calls embedding modules; gpt_neox has ``embed_in`` and ``embed_out``."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run Trainer on the model as axolotl's loader leaves it."""
    setup = inputs.setup
    if setup.config.method.stage != "sft":
        with pretended_machine(inputs), _axolotl() as patches:
            preferences = import_module("memplan.trace.stacks.huggingface.sft_loop")  # TRL, which SFT does not take
            # by axolotl (``rl_trainer_builds_adapter`` in loaders/patch_manager.py)
            adapted = setup.config.method.stage not in REFERRED
            load = partial(_adapted, patches) if adapted else _prepared
            run: StackRun = preferences.run_on(load, inputs, recorder, adapted=adapted)
            return replace(run, title=f"axolotl's model in {run.title}")
    ranks = deepspeed_ranks(setup, inputs.details.rank)
    with pretended_machine(inputs), ranks, tempfile.TemporaryDirectory() as folder, _axolotl() as patches:
        model = _adapted(patches, inputs)
        looks = bool(setup.config.parallel.unused_parameters)  # core/builders/causal.py, 265 to 271
        named = {**training_arguments(inputs, Path(folder)), "ddp_find_unused_parameters": looks}
        arguments, rows = transformers.TrainingArguments(**named), Rows(setup)
        trainer: Any = transformers.Trainer(
            model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=partial(collated, inputs)
        )
        return trained(trainer, model, recorder, "axolotl's model in Trainer's loop", setup)


def _adapted(patches: ModuleType, inputs: StackInputs) -> Any:
    """Return the model with axolotl's own adapters on it, where it has any, and its functions for them."""
    setup, model = inputs.setup, _prepared(inputs)
    if setup.config.adapter is not None:
        model = with_adapters(model, inputs)
        if setup.profile.fused_adapters:
            _with_functions(model, patches, setup.profile.fused_adapters)
    return model


def _prepared(inputs: StackInputs) -> Any:
    """Return the model, ready for adapters: cast to fp32 and back as ``_configure_embedding_dtypes`` does (loaders/model.py)."""
    setup = inputs.setup
    model = loaded_model(inputs, _staged if setup.config.parallel.staged_codes else quantised)
    if setup.config.adapter is None:
        if setup.format_names["norm"] != setup.loaded_float:
            _cast_ends(model, torch.float32)
        return model
    if quantises(setup) and is_sharded(setup.config.parallel):
        if setup.config.parallel.engine != "fsdp1":  # flat tensors have one dtype (axolotl 0.19: loaders/model.py)
            _cast_ends(model, torch.float32, gates=True)
    elif quantises(setup):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        _cast_ends(model, TORCH_DTYPES[setup.config.compute_dtype])
    model.enable_input_require_grads()
    return model


def _staged(model: Any, setup: TrainingSetup) -> Any:
    """Return the model with its linear layers, the head aside, as ``staged_nf4_loading`` leaves them (loaders/nf4.py)."""
    codes: Any = import_module("axolotl.utils.nf4")
    skips = codes.nf4_skip_modules(model.config.model_type, {})
    for path, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or not codes.nf4_should_quantize(
            f"{path}.weight", linear=True, expert=False, skips=skips
        ):
            continue
        shape = layer.weight.shape
        state = quant_state(shape, setup.format_names["hidden_matrix"], layer.weight.dtype)
        packed = torch.empty((ceil_div(shape.numel(), 2), 1), dtype=torch.uint8, device="meta")
        layer.weight = nn.Parameter(packed, requires_grad=False)
        codes.checkpoint_nf4_linear(layer)
        parametrize.register_parametrization(layer, "weight", codes.BnbNF4Parametrization(state), unsafe=True)
    model.requires_grad_(False)
    model._axolotl_staged_nf4 = True
    return model


def _decodes(codes: Any) -> Any:
    """Return a forward of axolotl's parametrisation that decodes without memory too, as it does on a card."""

    def forward(self: Any, data: Tensor) -> Tensor:
        with torch.no_grad():
            decoded: Tensor = codes.dequantize_bnb_4bit(data, self.quant_state)
            return decoded

    return forward


def _cast_ends(model: Any, dtype: torch.dtype, *, gates: bool = False) -> None:
    """Cast norms and embeddings, and routers, as ``_convert_embedding_modules_dtype`` does (loaders/model.py)."""
    for name, module in model.named_modules():
        end = "norm" in name or (any(part in name for part in EMBEDDINGS) and hasattr(module, "weight"))
        if end or (gates and name.endswith(".gate")):
            module.to(dtype)


def _with_functions(model: Any, patches: ModuleType, fused: Sequence[str]) -> None:
    """Put axolotl's functions in the place of PEFT's layers, as its patch manager does."""
    kernels: Any = patches
    attention = type(_layers(model)[0].self_attn)
    saved = {name: attention.__dict__.get(name) for name in ("forward", "_original_forward")}
    kernels.get_attention_cls_from_config = lambda _: attention
    try:
        if "qkv" in fused or "o" in fused:
            kernels.patch_self_attn_lora(SimpleNamespace(fused_attn_kernel=None))
        options = {f"lora_{part}_kernel": part in fused for part in ADAPTED}
        empty = dict.fromkeys(("use_scattermoe", "use_sonicmoe", "lora_embedding_kernel"))
        kernels.apply_lora_kernel_patches(model, SimpleNamespace(**options, **empty))
    except AssertionError as error:
        raise CannotAnswerError(f"axolotl cannot fuse the adapters of {attention.__name__}: {error}") from None
    for layer in _layers(model):  # the class goes back to what it was, its objects keep the patched function
        layer.self_attn.forward = attention.forward.__get__(layer.self_attn)
    for name, value in saved.items():
        if value is None and name in attention.__dict__:
            delattr(attention, name)
        elif value is not None:
            setattr(attention, name, value)


def _layers(model: Any) -> Any:
    inner = model.model.model
    return getattr(inner, "language_model", inner).layers


@contextmanager
def _axolotl() -> Iterator[ModuleType]:
    """Import axolotl's patches without the callbacks beside them, and let its kernels run without memory."""
    name = "axolotl.utils.callbacks"
    spec = find_spec("axolotl")
    if spec is None or spec.submodule_search_locations is None:
        raise CannotAnswerError("tracing stack axolotl needs axolotl")
    package = ModuleType(name)
    package.__path__ = [str(Path(spec.submodule_search_locations[0]) / "utils" / "callbacks")]
    sys.modules.setdefault(name, package)
    patches = import_module("axolotl.monkeypatch.lora_kernels")
    lora, quantize = (import_module(f"axolotl.kernels.{part}") for part in ("lora", "quantize"))
    codes_of_four: Any = import_module("axolotl.utils.nf4")
    sharding, codes = (import_module(f"axolotl.monkeypatch.{part}") for part in ("accelerate.fsdp2", "fsdp2_qlora"))
    stands: list[tuple[Any, str, Any]] = [
        (accelerate.accelerator, "fsdp2_prepare_model", sharding.fsdp2_prepare_model),  # as patch_accelerate_fsdp2
        (codes_of_four.BnbNF4Parametrization, "forward", _decodes(codes_of_four)),
        (quantize, "_ctypes_nf4_dequant", _decoded),
        (lora, "_activation_kernels", lambda _: (lambda _, up: torch.empty_like(up), lambda *given: given)),  # in place
        (lora, "_gradient_mm", _wide_product),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in stands]
    original = patches.__dict__["get_attention_cls_from_config"]
    made = {
        name: FSDPParam.__dict__[name] for name in ("_init_sharded_param", "init_unsharded_param", "init_dtype_attrs")
    }
    try:
        for owner, key, stand in stands:
            setattr(owner, key, stand)
        for patch in (
            codes.apply_init_sharded_param_patch,
            codes.apply_init_unsharded_param_patch,
            codes.apply_init_dtype_attrs_patch,
        ):
            patch._axolotl_patched = False
            patch()  # as _apply_fsdp2_bnb_patches
        yield patches
    finally:
        patches.__dict__["get_attention_cls_from_config"] = original
        for owner, key, value in saved:
            setattr(owner, key, value)
        for name, method in made.items():
            setattr(FSDPParam, name, method)


def _wide_product(left: Tensor, right: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return what ``_gradient_mm`` makes on a card: one product in the dtype of the adapter's matrix."""
    wide = dtype if dtype == torch.float32 else left.dtype
    return torch.empty((left.shape[0], right.shape[1]), dtype=wide, device=left.device).mul_(scale)


def _decoded(
    codes: Tensor,
    absmax: Tensor,
    _code: Tensor,
    _scales: Tensor,
    offset: Tensor,
    _size: int,
    _second: int,
    shape: Any,
    dtype: Any,
) -> Tensor:
    """Return what ``_ctypes_nf4_dequant`` allocates: the weight, and its scales in fp32 meanwhile."""
    out = torch.empty(tuple(shape), dtype=dtype, device=codes.device)
    scales = torch.empty(absmax.numel(), dtype=torch.float32, device=codes.device)
    scales += offset
    return out.t() if codes.shape[0] == 1 else out
