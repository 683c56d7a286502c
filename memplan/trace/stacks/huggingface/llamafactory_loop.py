"""LLaMA-Factory's model on Trainer's loop: its own gradient checkpointing, which makes each layer's input need a gradient."""

import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers

from memplan.catalog.training_config import ALL_TRAIN, Freeze
from memplan.errors import CannotAnswerError
from memplan.trace.pretended_cuda.chosen_rows import AllDesirable
from memplan.trace.recording.host_copies import copied_inputs
from memplan.trace.recording.recorder import Recorder
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.huggingface.built_model import loaded_model, made_on, with_adapters
from memplan.trace.stacks.huggingface.trainer_loop import (
    Rows,
    collated,
    pretended_machine,
    trained,
    training_arguments,
)
from memplan.trace.stacks.huggingface.watched_model import mark_weights
from memplan.trace.stacks.registry import StackInputs, StackRun

PACKAGES = ("llamafactory", "transformers", "peft", "accelerate", "bitsandbytes")


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run Trainer on the model as ``prepare_model_for_training`` and ``init_adapter`` leave it."""
    setup = inputs.setup
    copied = copied_inputs(recorder) if setup.config.offload.activations == "cpu" else nullcontext()
    with pretended_machine(inputs), copied, tempfile.TemporaryDirectory() as folder:
        model = loaded_model(inputs)
        if inputs.model.spec.tower is not None and setup.config.adapter is None and setup.config.freeze == ALL_TRAIN:
            _train_whole(model, inputs)
        options = SimpleNamespace(
            upcast_layernorm=False,
            upcast_lmhead_output=False,
            disable_gradient_checkpointing=setup.checkpointing == "none",
            use_unsloth_gc=setup.config.offload.activations == "cpu",
            use_reentrant_gc=inputs.details.reentrant,
        )
        _checkpointing().prepare_model_for_training(model, options)
        _bind_layers(model)
        if setup.config.adapter is not None:
            model = with_adapters(model, inputs, _targets(model, inputs))
            _cast_trained(model, inputs)
        if setup.config.freeze != ALL_TRAIN:
            _freeze_parts(model, inputs)
        # hparams leave Trainer's own gradient_checkpointing off: the model has it already
        arguments = {**training_arguments(inputs, Path(folder)), "gradient_checkpointing": False}
        if setup.has_value_head:
            return _on_values(model, arguments, inputs, recorder)
        if setup.config.method.stage != "sft":
            return _on_preferences(model, arguments, inputs, recorder)
        args = transformers.Seq2SeqTrainingArguments(**arguments)
        trainer: Any = transformers.Seq2SeqTrainer(
            model=model, args=args, train_dataset=Rows(setup), data_collator=partial(_collated, model, inputs)
        )
        if inputs.model.spec.tower is not None:
            trainer.model_accepts_loss_kwargs = False  # where there is a processor (train/sft/trainer.py)
        return trained(trainer, model, recorder, "LLaMA-Factory's model in Trainer's loop", setup)


def _on_preferences(model: Any, arguments: dict[str, Any], inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run LLaMA-Factory's own trainer of a stage, with rows as its collators make them."""
    setup = inputs.setup
    stage, reference = setup.config.method.stage, setup.config.method.reference_model
    finetuning = _Unset(
        pref_loss="sigmoid" if stage == "dpo" else stage,
        use_ref_model=stage == "dpo",
        pref_beta=0.1,
        pref_ftx=0.0,
        pref_bco_weight=0.0,
        dpo_label_smoothing=0.0,
        simpo_gamma=0.5,
        kto_chosen_weight=1.0,
        kto_rejected_weight=1.0,
    )
    trainer: Any = _trainer_of(stage)(
        model=model,
        ref_model=_reference(inputs) if reference == "resident" else None,
        finetuning_args=finetuning,
        processor=None,
        args=transformers.Seq2SeqTrainingArguments(**arguments, remove_unused_columns=False),
        data_collator=_mismatched if stage == "kto" else _pairs,
        train_dataset=Rows(setup),
        eval_dataset=Rows(setup),
        tokenizer=None,
    )
    if reference == "resident":
        mark_weights(trainer.ref_model, recorder)
    with AllDesirable():
        return trained(trainer, model, recorder, f"LLaMA-Factory's {type(trainer).__name__}", setup)


def _on_values(model: Any, arguments: dict[str, Any], inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run LLaMA-Factory's trainer of reward models on a model with TRL's value head, as ``load_model`` leaves it (model/loader.py)."""
    own = _trainer_of("reward")
    with made_on(inputs.device):
        valued: Any = import_module("trl.models.modeling_value_head").AutoModelForCausalLMWithValueHead
        model.state_dict = dict  # which it asks for, of a head of values that a checkpoint may have
        whole = valued.from_pretrained(model)
        del model.state_dict
    whole.get_input_embeddings, whole.get_output_embeddings = model.get_input_embeddings, model.get_output_embeddings
    trainer: Any = own(
        model=whole.train(),
        finetuning_args=_Unset(),
        processor=None,
        args=transformers.Seq2SeqTrainingArguments(**arguments, remove_unused_columns=False),
        data_collator=_pairs,
        train_dataset=Rows(inputs.setup),
        eval_dataset=Rows(inputs.setup),
        tokenizer=None,
    )
    whole.config = model.config
    return trained(trainer, whole, recorder, f"LLaMA-Factory's {own.__name__}", inputs.setup)


def _reference(inputs: StackInputs) -> Any:
    """Return a reference model as ``load_model`` leaves it, in the checkpoint's dtype, taken to be that of products (model/loader.py)."""
    model = loaded_model(inputs).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPES[inputs.setup.config.compute_dtype])
    return model


def _pairs(rows: list[Any]) -> Any:
    """Return chosen and rejected rows as ``PairwiseDataCollatorWithPadding`` joins them (data/collator.py)."""
    return transformers.default_data_collator([*rows, *rows])


def _mismatched(rows: list[Any]) -> Any:
    """Return rows, and answers to other prompts beside them, as ``KTODataCollatorWithPadding`` does (data/collator.py)."""
    batch: Any = transformers.default_data_collator(rows)
    others = {f"kl_{name}": value.clone() for name, value in batch.items()}
    return {**batch, **others, "kto_tags": torch.ones(len(rows), dtype=torch.bool)}


class _Unset(SimpleNamespace):
    """Arguments of which those that are not said are off."""

    def __getattr__(self, name: str) -> None:
        return None


class _Absent(ModuleType):
    """A module that nothing of is called."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _trainer_of(stage: str) -> Any:
    """Import LLaMA-Factory's trainer of a stage without the parser, callbacks and loaders beside it."""
    _checkpointing()
    for name in ("find_all_linear_modules", "load_model", "load_tokenizer", "load_valuehead_params"):
        setattr(sys.modules["llamafactory.model"], name, None)
    for name in ("train.callbacks", "hparams"):
        sys.modules.setdefault(f"llamafactory.{name}", _Absent(f"llamafactory.{name}"))
    options = import_module("trl.import_utils")
    for name, value in vars(options).copy().items():  # pairs since transformers 5, which are true whatever they hold
        if isinstance(value, tuple) and name.endswith("_available"):
            setattr(options, name, value[0])
    if stage == "reward":
        own: Any = import_module("llamafactory.train.rm.trainer")
        own.FixValueHeadModelCallback = transformers.TrainerCallback  # it splits checkpoints
        return own.PairwiseTrainer
    name = "KTO" if stage == "kto" else "DPO"
    return getattr(import_module(f"llamafactory.train.{name.lower()}.trainer"), f"Custom{name}Trainer")


def _cast_trained(model: Any, inputs: StackInputs) -> None:
    """Cast all that trains beside a model as ``_setup_lora_tuning`` does, copies of modules too (model/adapter.py)."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(TORCH_DTYPES[inputs.setup.adapter_dtype])


def _collated(model: Any, inputs: StackInputs, rows: list[Any]) -> Any:
    """Return rows with images, and the positions of their tokens where a model can tell them, as ``MultiModalDataCollatorForSeq2Seq`` does (data/collator.py)."""
    batch = collated(inputs, rows)
    whole = model.get_base_model() if inputs.setup.config.adapter is not None else model
    if not inputs.setup.config.images.per_row or not hasattr(whole.model, "get_rope_index"):
        return batch
    batch.pop("mm_token_type_ids")
    _checkpointing()
    collator = import_module("llamafactory.data.collator").MultiModalDataCollatorForSeq2Seq
    own = SimpleNamespace(get_rope_func=whole.model.get_rope_index, model=whole, processor=None)
    collator._compute_rope_position_ids(own, batch, batch)
    positions = batch["position_ids"]
    return {**batch, "position_ids": torch.cat([positions[:1], positions])}


def _parts(inputs: StackInputs) -> SimpleNamespace:
    """Return the arguments that say which parts of a vision-language model are frozen, or have no adapters."""
    images, adapter = inputs.setup.config.images, inputs.setup.config.adapter
    if adapter is None:
        frozen = (images.tower != "trained", images.projector != "trained")
    else:
        frozen = (adapter.vision not in (True, "tower"), adapter.vision not in (True, "projector"))
    names = ("freeze_vision_tower", "freeze_multi_modal_projector")
    return SimpleNamespace(**dict(zip(names, frozen, strict=True)), freeze_language_model=False)


def _targets(model: Any, inputs: StackInputs) -> list[str] | None:
    """Return the modules that get adapters as ``_setup_lora_tuning`` chooses them (model/adapter.py), or None where a config does."""
    adapter, text = inputs.setup.config.adapter, inputs.model.spec.tower is None
    if adapter is None or (text and adapter.targets != ("all-linear",)):
        return None
    _checkpointing()
    misc, visual = (import_module(f"llamafactory.model.model_utils.{name}") for name in ("misc", "visual"))
    options, targets = _parts(inputs), list(adapter.targets)
    if targets == ["all-linear"]:
        targets = misc.find_all_linear_modules(model, options.freeze_vision_tower)
    if text:
        return targets
    chosen: list[str] = visual.patch_target_modules(model, options, targets)
    return chosen


def _train_whole(model: Any, inputs: StackInputs) -> None:
    """Freeze what of a vision-language model is frozen, and cast the rest to fp32, by ``_setup_full_tuning`` (model/adapter.py)."""
    setup = inputs.setup
    cast = setup.autocast and setup.loaded_float == "fp32"  # else it is pure_bf16
    if cast:
        model.to(TORCH_DTYPES[setup.config.compute_dtype])  # as it is loaded
    _checkpointing()
    import_module("llamafactory.model.adapter")._setup_full_tuning(model, _parts(inputs), True, cast)


def _freeze_parts(model: Any, inputs: StackInputs) -> None:
    """Freeze what the setup says by ``_setup_freeze_tuning`` (model/adapter.py), which casts what trains to fp32.

    Raises:
        CannotAnswerError: LLaMA-Factory has no keys that say so.
    """
    setup, freeze = inputs.setup, inputs.setup.config.freeze
    layers = freeze.last_layers or -(freeze.first_layers or 0)
    said = Freeze(freeze.parameters, freeze.train, freeze.first_layers, freeze.last_layers, freeze.parts)
    if said != freeze or freeze.parameters or not layers or (freeze.first_layers and freeze.last_layers):
        raise CannotAnswerError(
            "LLaMA-Factory freezes all but the first or last layers, parts of these, and modules beside them"
        )
    model.requires_grad_(True)
    cast = setup.autocast and setup.loaded_float == "fp32"  # else it is pure_bf16
    if cast:
        model.to(TORCH_DTYPES[setup.config.compute_dtype])  # as it is loaded
    arguments = SimpleNamespace(
        use_llama_pro=False,
        freeze_trainable_layers=layers,
        freeze_trainable_modules=list(freeze.parts) or ["all"],
        freeze_extra_modules=list(freeze.train) or None,
        **vars(_parts(inputs)),
    )
    _checkpointing()
    import_module("llamafactory.model.adapter")._setup_freeze_tuning(model, arguments, True, cast)


def _bind_layers(model: Any) -> None:
    """Let layers hand their checkpointing a bound method, of which it asks what it is bound to.

    transformers 5.23.0 hands it a function and the layer (``GradientCheckpointingLayer`` in modeling_layers.py); the newest
    release that LLaMA-Factory 0.9.5 allows, 5.6, hands it the layer's own call.
    """

    def bound(own: Callable[..., Any], call: partial[Any], *args: Any) -> Any:
        return own(partial(MethodType(call.func, call.args[0]), **call.keywords), *args)

    for module in model.modules():
        if own := module.__dict__.get("_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = partial(bound, own)


def _checkpointing() -> Any:
    """Import LLaMA-Factory's checkpointing without its loader beside it."""
    spec = find_spec("llamafactory")
    if spec is None or spec.submodule_search_locations is None:
        raise CannotAnswerError("tracing stack llama-factory needs llamafactory")
    for name in ("model", "model.model_utils", "data", "train", "train.dpo", "train.kto", "train.rm"):
        package = ModuleType(f"llamafactory.{name}")
        package.__path__ = [str(Path(spec.submodule_search_locations[0], *name.split(".")))]
        sys.modules.setdefault(package.__name__, package)
    return import_module("llamafactory.model.model_utils.checkpointing")
