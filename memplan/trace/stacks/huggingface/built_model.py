"""Transformers' models, built from the keys of a ``config.json`` and set up as a job asks, with PEFT's adapters as each stack puts them."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import peft
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from memplan.catalog.training_config import ALL_TRAIN
from memplan.errors import CannotAnswerError
from memplan.step.tower.tower_settings import is_of_tower
from memplan.trace.pretended_cuda.bitsandbytes_layers import bitsandbytes_options, quantised, quantises
from memplan.trace.pretended_cuda.cut_loss import with_cut_cross_entropy
from memplan.trace.pretended_cuda.idle_kernels import with_linear_attention
from memplan.trace.recording.valueless_tensors import without_memory
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.huggingface.liger_kernels import with_liger
from memplan.trace.stacks.registry import StackInputs
from memplan.training.adapters import projections
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.frozen_rules import trained_names
from memplan.training.rules.stack_rules import casts_trained, is_flattened

DROPOUT_KEYS = (
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "resid_dropout", "residual_dropout", "embedding_dropout", "dropout", "embed_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob"
)  # fmt: skip
DTYPE = "torch_dtype" if Version(transformers.__version__) < Version("4.56") else "dtype"
"""What loading calls the dtype of weights, since transformers 4.56."""
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
"""Tokens that no step without values reads; those of large vocabularies lie outside of small ones."""


@contextmanager
def made_on(device: str) -> Iterator[None]:
    """Make every tensor on a device, and initialise none on ``meta``."""
    with without_memory() if device == "meta" else torch.device(device):
        yield


def base_dtype(setup: TrainingSetup) -> torch.dtype:
    """Return the dtype that weights are loaded in, those aside that are quantised.

    Raises:
        CannotAnswerError: Weights of different roles have different dtypes, which no loading makes.
    """
    if setup.config.adapter is None and casts_trained(setup.config, setup.stack) and not is_flattened(setup.config):
        return TORCH_DTYPES[setup.loaded_float]  # accelerate casts what trains of it
    names = {setup.format_names[role] for role in ("embedding", "head", "norm", "bias", "router")}
    if setup.kbit_floats or setup.stack.full_floats != "as-is":
        names = {setup.loaded_float}
    if not quantises(setup):
        names |= {setup.format_names[role] for role in ("hidden_matrix", "expert_matrix")}
    if len(names) > 1 or not names <= TORCH_DTYPES.keys():
        listed = ", ".join(sorted(names))
        raise CannotAnswerError(f"transformers loads a model in one dtype, and this job has {listed}")
    return TORCH_DTYPES[names.pop()]


def text_config(config: Any) -> Any:
    """Return what of a config is of the text model: all of it before transformers 4.45, which cannot be asked."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _ids(keys: Mapping[str, Any]) -> dict[str, int | None]:
    """Return tokens that lie inside of any vocabulary; RoBERTa counts positions behind that of padding."""
    return {**IDS, "pad_token_id": keys.get("pad_token_id", 1)} if "roberta" in str(keys["model_type"]) else IDS


def huggingface_config(keys: Mapping[str, Any], setup: TrainingSetup) -> Any:
    """Return transformers' config of the model that has ``keys`` in its ``config.json``."""
    given = {name: value for name, value in keys.items() if name not in ("model_type", "architectures", "dtype")}
    padded = {**IDS, "pad_token_id": 0}  # which Gemma 4 puts in the place of images
    nested = {name: {**value, **padded} for name, value in given.items() if name == "text_config"}
    config: Any = AutoConfig.for_model(str(keys["model_type"]), **{**given, **(nested or _ids(keys))})
    config = config if "vision_config" in keys else text_config(config)
    text = text_config(config)
    if setup.config.dropout is not None:
        for name in DROPOUT_KEYS:
            if hasattr(text, name):
                setattr(text, name, setup.config.dropout)
    if setup.config.method.balances:
        text.output_router_logits = True
    if setup.stack.loop.cache == "none":
        config.use_cache = text.use_cache = False
    return config


def loaded_model(inputs: StackInputs, coded: Callable[[Any, TrainingSetup], Any] = quantised) -> Any:
    """Return the model as ``from_pretrained`` leaves it: in one dtype, its linear layers quantised where asked for.

    Args:
        coded: What quantises them, where they are.

    Raises:
        CannotAnswerError: A package for its attention is missing, or transformers cannot load it so.
    """
    setup, attention = inputs.setup, inputs.details.attention
    config, dtype = huggingface_config(inputs.keys, setup), base_dtype(setup)
    # a name that transformers has had since 4.46
    whole = transformers.AutoModelForImageTextToText if "vision_config" in inputs.keys else AutoModelForCausalLM
    auto: Any = AutoModelForSequenceClassification if setup.scores else whole
    if setup.config.method.embedding is not None:
        auto = AutoModel
    if setup.scores:
        config.num_labels, config.pad_token_id = setup.score_count, 0
    if not inputs.is_traced:
        return frozen(_from_a_checkpoint(auto, config, dtype, inputs).train(), inputs)
    with without_memory():
        try:
            model = auto.from_config(config, **{DTYPE: dtype}, attn_implementation=attention)
        except ImportError as error:
            raise CannotAnswerError(f"transformers cannot run {inputs.keys['model_type']} so: {error}") from None
        except ValueError as error:  # as loading decides where nothing is asked for
            if attention == "flash_attention_2":
                raise CannotAnswerError(f"transformers: {str(error).partition('.')[0]}") from None
            model = auto.from_config(config, **{DTYPE: dtype}, attn_implementation="eager")
        model = _cast(model, dtype)
        model.tie_weights()  # 5.0 leaves that to loading where nothing has memory
        if quantises(setup):
            model = coded(model, setup)
    _freeze_tower(model, inputs)
    with_liger(model, setup)
    with_cut_cross_entropy(model, setup)
    with_linear_attention(model, setup)
    return frozen(model.train(), inputs)


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Return a model in one dtype, but for what its family keeps in fp32, and for buffers that no checkpoint has, which loading
    leaves as their module makes them.

    Source:
        ``_get_dtype_plan`` in transformers/modeling_utils.py and ``convert_and_load_state_dict_in_model`` in
        core_model_loading.py (5.24.0), which looks for these names in those of tensors.
    """
    apart = {part: {name: part._buffers[name] for name in part._non_persistent_buffers_set} for part in model.modules()}
    model = model.to(dtype)
    for part, buffers in apart.items():
        part._buffers.update(buffers)
    wide = [re.compile(name.replace("*", ".*")) for name in getattr(model, "_get_dtype_plan", lambda _: ())(dtype)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()] if wide else ():
        if any(pattern.search(name) for pattern in wide):
            tensor.data = tensor.data.float()
    return model


def frozen(model: Any, inputs: StackInputs) -> Any:
    """Return a model with those of its parameters frozen that the setup says."""
    freeze = inputs.setup.config.freeze
    if freeze != ALL_TRAIN:
        trained = trained_names(inputs.model, freeze)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
    return model


def _freeze_tower(model: Any, inputs: StackInputs) -> None:
    """Freeze what of a vision tower and its projector is not trained, as a script does before it makes an optimizer; LLaMA-Factory does it itself."""
    tower, images = inputs.model.spec.tower, inputs.setup.config.images
    if inputs.setup.stack.vision == "frozen-as-loaded" or tower is None or inputs.setup.config.adapter is not None:
        return
    for name, parameter in model.named_parameters():
        rule = images.projector if name.startswith(tower.projector) else images.tower
        if is_of_tower(name) and rule == "frozen":
            parameter.requires_grad_(False)


def _from_a_checkpoint(auto: Any, config: Any, dtype: torch.dtype, inputs: StackInputs) -> Any:
    """Return a model of random weights as ``from_pretrained`` loads it onto the device from a checkpoint of it."""
    profile = inputs.setup.profile
    if "in-place" in (profile.norm, profile.rotary, profile.activation) or profile.loss in (
        "fused-linear",
        "cut-cross-entropy",
    ):
        raise CannotAnswerError("kernels of Liger and cut cross-entropy are patched into a traced model alone")
    with tempfile.TemporaryDirectory() as folder:
        auto.from_config(config, **{DTYPE: dtype}).save_pretrained(folder)
        options: dict[str, Any] = {DTYPE: dtype, "device_map": {"": inputs.device}}
        if quantises(inputs.setup):
            options["quantization_config"] = bitsandbytes_options(inputs.setup)
        try:
            return auto.from_pretrained(folder, attn_implementation=inputs.details.attention, **options)
        except ValueError:  # as loading decides where nothing is asked for
            return auto.from_pretrained(folder, attn_implementation="eager", **options)


ALPHA_PER_RANK = 2
TOWER = r".*\b(visual|vision_tower|multi_modal_projector|vision_model|connector)\b.*"
"""Modules of a vision tower and its projector."""


def lora_config(inputs: StackInputs, chosen: list[str] | str | None = None) -> Any:
    """Return PEFT's config of the adapters that a setup asks for, on the modules that a library has chosen by a rule of its own."""
    adapter, details = inputs.setup.config.adapter, inputs.details
    assert adapter is not None
    targets: Any = list(adapter.targets)
    if chosen is not None:
        targets = chosen
    elif (
        len(targets) > 1 and "all-linear" in targets
    ):  # PEFT takes these words alone; trainers list what they stand for
        targets = sorted({*targets, *projections(inputs.model)} - {"all-linear"})
    elif "all-linear" in targets:
        targets = "all-linear"
    tower = {"exclude_modules": TOWER} if chosen is None and not adapter.vision else {}
    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=ALPHA_PER_RANK * adapter.rank,
        lora_dropout=details.adapter_dropout,
        target_modules=targets,
        use_dora=adapter.kind == "dora",
        modules_to_save=list(details.modules_to_save) or None,
        fan_in_fan_out=inputs.model.spec.transposed_linear,
        bias="none",
        task_type=_task(inputs.setup),
        **tower,
    )


def _task(setup: TrainingSetup) -> str:
    if setup.config.method.embedding is not None:
        return "FEATURE_EXTRACTION"
    return "SEQ_CLS" if setup.scores else "CAUSAL_LM"


def adapted(model: Any, inputs: StackInputs) -> Any:
    """Return the model as PEFT's documentation prepares it: for training of few bits, then with adapters."""
    setup = inputs.setup
    checkpoints = setup.checkpointing != "none"
    kwargs = {"use_reentrant": inputs.details.reentrant}
    if setup.kbit_floats:
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=checkpoints, gradient_checkpointing_kwargs=kwargs
        )
    elif checkpoints:
        model.gradient_checkpointing_enable(kwargs)
        model.enable_input_require_grads()
    return with_adapters(model, inputs)


def with_adapters(model: Any, inputs: StackInputs, chosen: list[str] | str | None = None) -> Any:
    """Return the model with adapters, in the dtype that the setup says, on the modules that a library has chosen, or its targets name.

    PEFT gives adapters the dtype of the weights beside them and casts 16 bits to fp32, or not
    (``autocast_adapter_dtype``); both are left out on ``meta`` (tuners_utils.py, ``_move_adapter_to_device_of_base_layer``).
    """
    with made_on(inputs.device):
        model = peft.get_peft_model(model, lora_config(inputs, chosen))
    return adapters_cast(model, inputs.setup)


def adapters_cast(model: Any, setup: TrainingSetup) -> Any:
    """Return a model whose adapters are in the dtype that a setup says."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.data = parameter.data.to(TORCH_DTYPES[setup.adapter_dtype])
    return model
