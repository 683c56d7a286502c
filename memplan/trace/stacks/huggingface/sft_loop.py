"""The loops of TRL's trainers: their own preparation of model and adapters, their own loss, the Trainer's ``train()``."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import bitsandbytes
import datasets
import tokenizers
import transformers
import trl
import trl.trainer.sft_trainer as sft_trainer
from torch import Tensor

from memplan.catalog.config_keys.method_keys import Method
from memplan.step.states.parallel_shards import is_sharded, runs_engine
from memplan.trace.pretended_cuda.chosen_rows import AllDesirable, ChosenRows
from memplan.trace.pretended_cuda.fake_devices import all_replaced
from memplan.trace.pretended_cuda.known_images import image_columns
from memplan.trace.ranks.deepspeed_engine import deepspeed_ranks
from memplan.trace.recording.host_copies import host_copies
from memplan.trace.recording.recorder import Recorder
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.trace.stacks.huggingface.built_model import loaded_model, lora_config, made_on
from memplan.trace.stacks.huggingface.generated_rows import (
    generating,
    learns_generated,
    loaded_reference,
    rollout_arguments,
    taught,
    taught_arguments,
    taught_columns,
    whole_completions,
)
from memplan.trace.stacks.huggingface.trainer_loop import (
    machine_of,
    row_count,
    trained,
    training_arguments,
)
from memplan.trace.stacks.registry import StackInputs, StackRun
from memplan.trace.stacks.trl_kernels import (
    divergence_kernels,
    log_probability_kernels,
    nothing,
    pair_kernels,
    tile_kernels,
)
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.distillation_rules import DISTILLED, on_policy
from memplan.training.rules.method_rules import GENERATING, REFERRED
from memplan.training.rules.ppo_rules import BESIDE_VALUES
from memplan.training.second_models import TEACHER

PACKAGES = ("trl", "transformers", "peft", "accelerate", "bitsandbytes")
ASSUMED = "every token of a row has a label, as in packed rows"


TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
"""Stage -> what its trainer and that one's arguments are named by."""

PAIRS = {"orpo": "ORPO", "cpo": "CPO", "simpo": "CPO"}
"""Stage -> what the trainer and its arguments in ``trl.experimental`` are named by."""

OWN_LOOP = {"ppo": "PPO"}
"""The same of those whose loop is their own."""

TAUGHT = {"gkd": "GKD", "distillation": "Distillation"}
"""The same of what runs a distillation, of which the first is in ``trl.experimental``."""


def trainer_of(method: Method) -> tuple[Any, Any]:
    """Return a method's trainer, and that one's arguments."""
    name = TAUGHT[method.trainer] if method.trainer is not None else {**TRAINERS, **PAIRS, **OWN_LOOP}[method.stage]
    core = method.stage in TRAINERS or on_policy(method)
    module = trl if core else import_module(f"trl.experimental.{name.lower()}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run the trainer of the setup's stage on the model that the inputs ask for."""
    with machine_of(inputs):
        if inputs.setup.config.method.stage in BESIDE_VALUES:
            trainer = trainer_of(inputs.setup.config.method)
            loop: Any = import_module("memplan.trace.stacks.own_trainers.ppo_loop")
            ran: StackRun = loop.run_ppo(*trainer, inputs, _tokenizer(trainer[0])["processing_class"], recorder)
            return ran
        return run_on(loaded_model, inputs, recorder)


def run_on(
    load: Callable[[StackInputs], Any], inputs: StackInputs, recorder: Recorder, *, adapted: bool = False
) -> StackRun:
    """Run the trainer of the setup's stage on what ``load`` returns, with adapters or for it to make; the machine is pretended already."""
    config = inputs.setup.config
    stage = config.method.stage
    trainer_class, arguments_class = trainer_of(config.method)
    with (
        deepspeed_ranks(inputs.setup, inputs.details.rank),
        _host_copies(inputs.setup, recorder),
        _pretended_kernels(inputs) if inputs.is_traced else nullcontext(),
        tempfile.TemporaryDirectory() as folder,
    ):
        model = load(inputs)
        keywords = training_arguments(inputs, Path(folder))
        with made_on(inputs.device):
            adapters = lora_config(inputs) if config.adapter is not None and not adapted else None
        beside = _given_beside(load, inputs)
        arguments: Any = arguments_class(**keywords, **_stage_arguments(inputs.setup, arguments_class))
        with made_on(inputs.device), loaded_reference(load, inputs), _codes_on_a_card(), _prepared_later(inputs.setup):
            trainer: Any = trainer_class(
                model=model,
                args=arguments,
                train_dataset=_rows(inputs),
                eval_dataset=_rows(inputs) if config.evaluation else None,
                peft_config=adapters,
                **beside,
                **_tokenizer(trainer_class),
            )
        own = trainer.data_collator
        if config.images.per_row:
            trainer.data_collator = lambda rows: {
                **own(rows),
                **image_columns(inputs.model.spec, inputs.setup, len(rows)),
            }
        if config.adapter is not None and (adapters is not None or stage == "reward"):
            _in_the_setups_dtype(trainer.model, inputs)
        if learns_generated(config.method):
            generating(trainer, inputs, recorder)
        if stage in DISTILLED:
            taught(trainer, inputs.setup, recorder)
        answers = AllDesirable() if stage == "kto" else ChosenRows(inputs.setup.answer_length)
        chosen = answers if inputs.is_traced else nullcontext()
        with chosen, whole_completions(inputs.setup):
            run = trained(trainer, model, recorder, f"TRL's {trainer_class.__name__}", inputs.setup)
    return StackRun(run.title, run.vocab_size, (ASSUMED,))


def _given_beside(load: Callable[[StackInputs], Any], inputs: StackInputs) -> dict[str, Any]:
    """Return what a stage's trainer is given beside the model: a second one, or what scores completions."""
    method = inputs.setup.config.method
    if method.stage in GENERATING:
        return {"reward_funcs": len}
    if method.stage in DISTILLED:
        return {"teacher_model": load(inputs.beside(TEACHER)).eval()}
    referred = method.reference_model == "resident" and method.stage in REFERRED
    return {"ref_model": load(inputs).eval()} if referred else {}


def _prepared_later(setup: TrainingSetup) -> AbstractContextManager[Any]:
    """Return what leaves a second model as it is while its trainer is made: a reference where shards of it are made with those of
    the model, and a teacher, whose forward runs in a precision that is pretended later.
    """
    taught = setup.teacher is not None
    shared = taught or (is_sharded(setup.config.parallel) and not runs_engine(setup.config.parallel))
    as_it_is = patch.object(accelerate.Accelerator, "prepare_model", lambda _, model, **__: model)
    return as_it_is if shared else nullcontext()


def _host_copies(setup: TrainingSetup, recorder: Recorder) -> AbstractContextManager[None]:
    """Return what counts the activations that TRL keeps in host memory, where the setup asks for it."""
    if setup.config.offload.activations == "none":
        return nullcontext()
    return host_copies(import_module("trl.models.activation_offloading"), recorder)


def _stage_arguments(setup: TrainingSetup, arguments_class: Any) -> dict[str, Any]:
    """Return what a stage's trainer is told beyond Trainer's arguments."""
    method = setup.config.method
    if learns_generated(method):
        more: dict[str, Any] = rollout_arguments(setup)
    else:
        longest = "max_length" if hasattr(arguments_class, "max_length") else "max_seq_length"  # up to 0.15
        more = {longest: setup.config.sequence_length, **pair_arguments(setup)}
    if method.stage == "sft":
        more["dataset_kwargs"] = {"skip_prepare_dataset": True}
        more |= {"packing": True} if setup.config.joined_rows else {}
    if method.trainer == "gkd":
        more |= taught_arguments(setup)
    if method.reference_model == "precomputed" and method.stage not in GENERATING:
        more["precompute_ref_log_probs"] = True
    if setup.config.offload.activations != "none":
        more["activation_offloading"] = True
    if method.balances is False:
        more["router_aux_loss_coef"] = 0.0
    return more


@contextmanager
def _codes_on_a_card() -> Iterator[None]:
    """Let TRL up to 0.25, which takes 4-bit codes on ``meta`` for those of a sharded model, prepare the model beside them all the same.

    Source:
        ``is_sharded_qlora`` in trl/trainer/sft_trainer.py, lines 571 to 601 (0.19.1), which asks for the name of the class.
    """
    codes = bitsandbytes.nn.Params4bit
    if not hasattr(sft_trainer, "peft_module_casting_to_bf16"):
        yield
        return
    name, codes.__name__ = codes.__name__, "Params4bit on a card"
    try:
        yield
    finally:
        codes.__name__ = name


def _in_the_setups_dtype(model: Any, inputs: StackInputs) -> None:
    """Give adapters the dtype that the setup says, where it is another one than TRL's own choice."""
    for name, parameter in model.named_parameters():
        factor = ".lora_A." in name or ".lora_embedding_" in name
        if (parameter.requires_grad and factor) or ".lora_B." in name:
            parameter.data = parameter.data.to(TORCH_DTYPES[inputs.setup.adapter_dtype])


def _rows(inputs: StackInputs) -> Any:
    config = inputs.setup.config
    count = row_count(inputs.setup)
    stage, length = config.method.stage, config.sequence_length
    row, prompt, answer = [[1] * length] * count, [[1]] * count, [[1] * (length - 1)] * count
    known = [0.0] * count if config.method.reference_model == "precomputed" else None
    columns: dict[str, Any] = {"input_ids": row, "labels": row}
    if config.joined_rows:
        columns["seq_lengths"] = [[1, length - 1]] * count
    if stage == "reward":
        columns = {"chosen_ids": row, "rejected_ids": row}
    elif learns_generated(config.method):
        columns = {"prompt": ["-"] * count}
    elif stage in PAIRS:
        return _pairs(row, prompt)
    elif stage in DISTILLED:
        columns = taught_columns(inputs.setup, count)
    elif stage == "kto":
        columns = {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": answer}
        columns |= {"label": [True, False] * (count // 2) + [True] * (count % 2)}
        columns |= {"ref_logps": known, "ref_KL_logps": known} if known else {}
    elif stage == "dpo":
        columns = {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer}
        columns |= {"ref_chosen_logps": known, "ref_rejected_logps": known} if known else {}
    return datasets.Dataset.from_dict(columns)


def _pairs(row: list[list[int]], prompt: list[list[int]]) -> Any:
    """Return rows as ``tokenize_row`` makes them, which are made once."""
    columns = {f"prompt_{kind}": prompt for kind in ("input_ids", "attention_mask")}
    kinds = ("input_ids", "attention_mask", "labels")
    columns |= {f"{side}_{kind}": row for side in ("chosen", "rejected") for kind in kinds}
    dataset = datasets.Dataset.from_dict(columns)
    dataset.map = lambda *_, **__: dataset
    return dataset


def pair_arguments(setup: TrainingSetup) -> dict[str, Any]:
    """Return what ``CPOConfig`` has besides."""
    method = setup.config.method
    if PAIRS.get(method.stage) != "CPO":
        return {}
    return {
        "loss_type": "simpo" if method.stage == "simpo" else "sigmoid",
        "cpo_alpha": 1.0 if method.chosen_nll else 0.0,
    }


def _tokenizer(trainer: Any) -> dict[str, Any]:
    """Return a tokenizer by the name that a trainer has for it, ``tokenizer`` up to TRL 0.11."""
    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    fast: Any = transformers.PreTrainedTokenizerFast
    made = fast(tokenizer_object=tokenizers.Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
    named = "processing_class" in signature(trainer.__init__).parameters
    return {"processing_class" if named else "tokenizer": made}


@contextmanager
def _pretended_kernels(inputs: StackInputs) -> Iterator[None]:
    """Let TRL's loss run as on a GPU: Triton kernels write into what they are given and allocate nothing.

    Before 1.15 it goes over chunks, whose end it reads from the device: of all tokens but the last of each row.

    Source:
        trl 1.16.0, kernels/chunked_logprob.py: ``_forward_kernel``, ``_backward_kernel``, ``_addmm_fp32``;
        trl 1.12.0, trainer/sft_trainer.py, lines 202 to 206.
    """
    method = inputs.setup.config.method
    stage = method.stage
    if find_spec("trl.kernels.chunked_logprob") if find_spec("trl.kernels") else False:
        answers = tile_kernels() + (pair_kernels() if stage in PAIRS else [])
        answers += divergence_kernels() if on_policy(method) else []
    else:
        answers = _chunk_loop(inputs) + log_probability_kernels()
    if stage != "sft":
        own, _ = trainer_of(method)
        answers += [
            (own, name, _as_it_is) for name in ("_prepare_dataset", "_precompute_ref_logps") if hasattr(own, name)
        ]
        if stage in REFERRED:
            module = import_module(own.__module__)
            answers.append((module, "hash_module", nothing))
            if hasattr(module, "disable_gradient_checkpointing"):  # and back on, with a function that tells nobody
                answers.append((module, "disable_gradient_checkpointing", lambda *_: nullcontext()))
    casts = import_module(trainer_of(method)[0].__module__)
    if hasattr(casts, "peft_module_casting_to_bf16") and inputs.setup.config.compute_dtype != "bf16":
        answers.append((casts, "peft_module_casting_to_bf16", nothing))  # it is told of bf16 in place of fp16
    with all_replaced((owner, {name: function}) for owner, name, function in answers):
        yield


def _chunk_loop(inputs: StackInputs) -> list[tuple[Any, str, Any]]:
    config = inputs.setup.config
    tokens = config.micro_batch_size * (config.sequence_length - 1)
    if not hasattr(sft_trainer, "_chunked_cross_entropy_loss"):
        return []

    def counted(start: int, stop: Any, step: int = 1) -> range:
        return range(start, tokens if isinstance(stop, Tensor) else stop, step)

    return [(sft_trainer, "range", counted)]


def _as_it_is(_: Any, dataset: Any, *__: Any) -> Any:
    """Return rows that have been made already, with what is known of them."""
    return dataset
