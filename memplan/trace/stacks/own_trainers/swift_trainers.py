"""ms-swift's own trainers: their batches, losses and metrics, on models of transformers with PEFT's adapters."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers.modeling_utils

from memplan.trace.pretended_cuda.chosen_rows import ChosenRows
from memplan.trace.pretended_cuda.known_images import OWN_ADDITION, image_columns
from memplan.trace.recording.recorder import Recorder
from memplan.trace.stacks.huggingface.built_model import loaded_model, with_adapters
from memplan.trace.stacks.huggingface.trainer_loop import (
    pretended_machine,
    row_count,
    trained,
    training_arguments,
)
from memplan.trace.stacks.huggingface.watched_model import mark_weights
from memplan.trace.stacks.registry import StackInputs, StackRun
from memplan.training.resolved import TrainingSetup

PACKAGES = ("ms-swift", "trl", "transformers", "peft", "accelerate", "bitsandbytes")
UNLABELLED = -100
"""Label of a row's first token, which nothing predicts (``labels[0] = -100`` in swift/template/base.py, 4.6.0)."""

TRAINERS = {
    "sft": ("swift.trainers.seq2seq_trainer.Seq2SeqTrainer", "swift.trainers.arguments.Seq2SeqTrainingArguments"),
    "classification": ("swift.trainers.trainer.Trainer", "swift.trainers.arguments.TrainingArguments"),
    "dpo": ("swift.rlhf_trainers.dpo_trainer.DPOTrainer", "swift.rlhf_trainers.arguments.DPOConfig"),
    "kto": ("swift.rlhf_trainers.kto_trainer.KTOTrainer", "swift.rlhf_trainers.arguments.KTOConfig"),
    "orpo": ("swift.rlhf_trainers.orpo_trainer.ORPOTrainer", "swift.rlhf_trainers.arguments.ORPOConfig"),
    "cpo": ("swift.rlhf_trainers.cpo_trainer.CPOTrainer", "swift.rlhf_trainers.arguments.CPOConfig"),
    "simpo": ("swift.rlhf_trainers.cpo_trainer.CPOTrainer", "swift.rlhf_trainers.arguments.CPOConfig"),
    "reward": ("swift.rlhf_trainers.reward_trainer.RewardTrainer", "swift.rlhf_trainers.arguments.RewardConfig"),
}
"""Stage -> its trainer, and that one's arguments (``TrainerFactory`` in swift/trainers/trainer_factory.py, 4.6.0)."""

TEMPLATE = "swift.template.base.Template"
SEEING = {
    "qwen2_5_vl": ("swift.template.templates.qwen.Qwen2_5VLTemplate", "qwen2_vl"),
    "qwen3_vl": ("swift.template.templates.qwen.Qwen3VLTemplate", "qwen3_vl"),
    "gemma3": ("swift.template.templates.gemma.Gemma3VisionTemplate", "llava_hf"),
}
"""Family -> its template, and what its parts are called by (swift/template/templates, swift/model/model_arch.py, 4.6.0)."""

DROPPED_OUTPUTS = {"qwen3_vl": "Qwen3VLModelOutputWithPast", "qwen3_vl_moe": "Qwen3VLMoeModelOutputWithPast"}
"""Classes that ms-swift imports, which transformers 5.23 has no more (ms-swift 4.6.0 allows those before 5.20)."""

MODES = {"sft": "train", "classification": "train", "kto": "kto"}
"""Stage -> what its template is told that rows are for; others are ``rlhf`` (swift/pipelines/train/rlhf.py)."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run the trainer of the setup's stage on the model as ``prepare_model`` leaves it (swift/pipelines/train/tuner.py)."""
    setup = inputs.setup
    own, arguments_class = (_named(path) for path in TRAINERS[setup.config.method.stage])
    with pretended_machine(inputs), tempfile.TemporaryDirectory() as folder, _own_checkpointing():
        model = _described(loaded_model(inputs), inputs)
        if setup.config.adapter is not None:
            model = with_adapters(model, inputs, _targets(model, inputs))
        resident = setup.config.method.reference_model == "resident"
        beside = _described(loaded_model(inputs), inputs).requires_grad_(False).eval() if resident else None
        arguments = {**training_arguments(inputs, Path(folder)), **_stage_arguments(setup)}
        rows = _Rows(inputs)
        trainer: Any = own(
            model=model,
            args=arguments_class(**arguments, check_model=False, dataloader_num_workers=0, remove_unused_columns=False),
            template=_template(model, inputs),
            train_dataset=rows,
            eval_dataset=rows if setup.config.evaluation else None,
            **({"ref_model": beside} if resident else {}),
        )
        if resident:
            mark_weights(trainer.ref_model, recorder)
        with _Batches():
            return trained(trainer, model, recorder, f"ms-swift's {own.__name__}", setup)


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if module.rpartition(".")[2][:1].isupper():  # of a class
        return getattr(_named(module), name)
    return getattr(import_module(module), name)


def _described(model: Any, inputs: StackInputs) -> Any:
    """Return a model with what ms-swift's loader writes down about it (swift/model/register.py)."""
    seen = inputs.setup.config.images.per_row > 0
    arch = _named("swift.model.model_arch.get_model_arch")(SEEING[inputs.model.spec.architecture][1]) if seen else None
    model.generation_config = getattr(model, "generation_config", None)
    model.model_meta = SimpleNamespace(is_multimodal=seen, model_arch=arch)
    model.model_info = SimpleNamespace(is_moe_model=False)
    if seen:
        _named("swift.model.register.ModelLoader._compat_transformers5")(
            SimpleNamespace(model_meta=model.model_meta), model
        )
    if seen and inputs.model.spec.architecture == "qwen3_vl":
        for family, name in DROPPED_OUTPUTS.items():  # what nothing calls but under DeepSpeed
            vars(import_module(f"transformers.models.{family}.modeling_{family}")).setdefault(name, None)
        _named("swift.model.models.qwen._compat_qwen3_vl_mixed_data")(model.model, None)
        text = vars(model.model.language_model)
        text[OWN_ADDITION] = text.pop("_deepstack_process")
    return model


def _stage_arguments(setup: TrainingSetup) -> dict[str, Any]:
    """Return what the arguments of a stage have besides."""
    method = setup.config.method
    losses = {"dpo": "sigmoid", "cpo": "sigmoid", "simpo": "simpo", "kto": "kto"}
    more: dict[str, Any] = {"loss_type": losses[method.stage]} if method.stage in losses else {}
    if method.stage in ("cpo", "simpo"):
        more["cpo_alpha"] = 1.0 if method.chosen_nll else 0.0
    return more


def _targets(model: Any, inputs: StackInputs) -> str | None:
    """Return which modules of a vision-language model get adapters, as ``get_target_modules`` chooses them (swift/pipelines/train/tuner.py)."""
    adapter = inputs.setup.config.adapter
    if not model.model_meta.is_multimodal or adapter is None or "all-linear" not in adapter.targets:
        return None
    chosen: str = _named("swift.utils.get_multimodal_target_regex")(
        model,
        freeze_vit=adapter.vision not in (True, "tower"),
        freeze_aligner=adapter.vision not in (True, "projector"),
    )
    return chosen


def _template(model: Any, inputs: StackInputs) -> Any:
    """Return ms-swift's own template, whose collator makes batches of rows that have been encoded already."""
    setup = inputs.setup
    seen = setup.config.images.per_row > 0
    template: Any = object.__new__(_named(SEEING[inputs.model.spec.architecture][0] if seen else TEMPLATE))
    vars(template).update(
        template_meta=SimpleNamespace(stop_words=[], template_type="none"),
        processor=SimpleNamespace(pad_token_id=0, eos_token_id=1),
        config=SimpleNamespace(problem_type="single_label_classification" if setup.score_count > 1 else "regression"),
        model=model,
        model_meta=model.model_meta,
        max_length=setup.config.sequence_length,
        use_chat_template=True,
        remove_unused_columns=True,
        padding_side="right",
        sequence_parallel_size=1,
        padding_free=False,
        packing=False,
        is_encoder_decoder=False,
        mode=MODES.get(setup.config.method.stage, "rlhf"),
        task_type="seq_cls" if setup.scores else "causal_lm",
        use_megatron=False,
        model_accepts_loss_kwargs=None,
        _handles=[],
        _deepspeed_initialize=None,
    )
    template.init_env_args()
    return template


class _Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """As many full rows as the steps take, as templates encode them."""

    def __init__(self, inputs: StackInputs) -> None:
        self.length, self.setup = row_count(inputs.setup), inputs.setup
        columns = image_columns(inputs.model.spec, inputs.setup, 1)
        self.seen = {name: part[0] if name.endswith("type_ids") else part for name, part in columns.items()}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        length, stage = self.setup.config.sequence_length, self.setup.config.method.stage
        row: dict[str, Any] = {"input_ids": [1] * length, "labels": [UNLABELLED] + [1] * (length - 1)}
        if stage == "sft":
            return {**row, **self.seen}
        if self.setup.scores:
            row.pop("labels")
        if stage == "classification":
            return {**row, "labels": 1 if self.setup.score_count > 1 else 1.0}
        both = {f"{side}_{name}": value for side in ("chosen", "rejected") for name, value in row.items()}
        return {**both, "label": index % 2 == 0} if stage == "kto" else both


class _Batches(ChosenRows):  # type: ignore[no-untyped-call]
    """Takes all tokens of a row for labelled but its first, where a mask chooses labels, and gradients for numbers.

    Source:
        ``prepare_logits_to_keep`` and ``_fix_grad_norm_nan`` in swift/trainers/mixin.py (4.6.0).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.isnan.default and args[0].is_meta:
            return torch.zeros((), dtype=torch.bool)
        if func is torch.ops.aten.index.Tensor and args[0].is_meta and args[0].dtype == torch.long:
            masks = [item for item in args[1] if item is not None]
            if len(masks) == 1 and masks[0].dtype == torch.bool and masks[0].dim() == 1:
                result = torch.empty((masks[0].numel() - 1, 1), dtype=torch.long, device="meta")
                return func(args[0], [None if item is None else result.unbind(1)[0] for item in args[1]])
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _own_checkpointing() -> Iterator[None]:
    """Take away again the function that a trainer puts in the place of torch's checkpointing."""
    owner: Any = torch.utils.checkpoint
    models: Any = transformers.modeling_utils
    saved, named = owner.checkpoint, models.__dict__.get("checkpoint")
    try:
        yield
    finally:
        owner.checkpoint = saved
        if named is not None:
            models.checkpoint = named
        owner.__dict__.pop("_old_checkpoint", None)
