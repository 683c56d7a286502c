"""The loop of Sentence Transformers: its own trainer, losses and pooling, on models of transformers with PEFT's adapters."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import tokenizers
import torch
import transformers
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.base.losses import gradcache
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import Tensor

from memplan.catalog.config_keys.method_keys import Embedding
from memplan.trace.recording.recorder import Recorder
from memplan.trace.stacks.huggingface.built_model import adapters_cast, loaded_model, lora_config, made_on
from memplan.trace.stacks.huggingface.masked_rows import pads_rows
from memplan.trace.stacks.huggingface.trainer_loop import has_types, machine_of, row_count, trained, training_arguments
from memplan.trace.stacks.registry import StackInputs, StackRun
from memplan.training.resolved import TrainingSetup

PACKAGES = ("sentence-transformers", "transformers", "peft", "accelerate", "bitsandbytes")
_minibatch = gradcache._create_minibatch

POOLINGS = {"mean": "mean", "last": "lasttoken", "cls": "cls"}
"""Pooling -> what it is called there."""


def run(inputs: StackInputs, recorder: Recorder) -> StackRun:
    """Run Sentence Transformers' trainer on the model that the inputs ask for, with the loss of its stage."""
    setup = inputs.setup
    texts = setup.config.method.embedding
    assert texts is not None, "the stack runs no other stage"
    with machine_of(inputs), tempfile.TemporaryDirectory() as folder:
        model = _sentence_model(inputs, texts, Path(folder))
        if setup.config.adapter is not None:
            with made_on(inputs.device):
                model.add_adapter(lora_config(inputs))
            adapters_cast(model, setup)
        model.register_forward_hook(lambda _module, _features, made: _reached(recorder, made))
        rows = datasets.Dataset.from_dict({name: [""] * row_count(setup) for name in _columns(texts)})
        trainer: Any = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(**training_arguments(inputs, Path(folder))),
            train_dataset=rows,
            eval_dataset=rows,
            loss=_loss(model, texts),
            data_collator=_Collator(setup, texts, has_types(inputs.model.spec)),
        )
        with mock.patch.object(gradcache, "_create_minibatch", _untrimmed):
            return trained(trainer, model, recorder, "Sentence Transformers' trainer", setup)


def _untrimmed(features: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return the rows of a mini-batch, whose columns are all tokens: only values of a mask would tell, and there are none."""
    mask = features["attention_mask"][begin:end]
    rest = {name: value for name, value in features.items() if name != "attention_mask"}
    return {**_minibatch(rest, begin, end), "attention_mask": mask}


def _reached(recorder: Recorder, made: Mapping[str, Tensor]) -> None:
    if torch.is_grad_enabled():
        recorder.backward_reaches(made["sentence_embedding"], "loss backward")


def _columns(texts: Embedding) -> tuple[str, ...]:
    return ("anchor", "positive", *[f"negative_{number}" for number in range(1, texts.columns - 1)])[: texts.columns]


def _sentence_model(inputs: StackInputs, texts: Embedding, folder: Path) -> Any:
    """Return a model with its pooling, as ``SentenceTransformer`` loads it, and a tokenizer of one word."""
    model = loaded_model(inputs)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0}, unk_token="word"))
    kind: Any = transformers.PreTrainedTokenizerFast
    kind(tokenizer_object=words, pad_token="word").save_pretrained(folder)
    model.config.save_pretrained(folder)
    with mock.patch.object(Transformer, "_load_model", return_value=model):
        transformer = Transformer(str(folder))
    pooling = Pooling(inputs.model.spec.hidden_size, pooling_mode=POOLINGS[texts.pooling])
    return SentenceTransformer(modules=[transformer, pooling], device=inputs.device).train()


def _loss(model: Any, texts: Embedding) -> Any:
    """Return the loss of Sentence Transformers that a method asks for."""
    if texts.mini_batch_size is not None:
        return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=texts.mini_batch_size)
    if texts.loss == "pairs":
        return losses.TripletLoss(model) if texts.columns > 2 else losses.CosineSimilarityLoss(model)
    return losses.MultipleNegativesRankingLoss(model)


@dataclass
class _Collator:
    """Makes a micro-batch of full rows, tokens as numbers already, in the place of a collator that asks a tokenizer."""

    setup: TrainingSetup
    texts: Embedding
    typed: bool  # Whether a tokenizer tells the type of each token
    valid_label_columns: list[str] = field(default_factory=lambda: ["label"])

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        shape = len(rows), self.setup.config.sequence_length
        batch: dict[str, Any] = {}
        for name in _columns(self.texts):
            mask = torch.ones(shape, dtype=torch.long)
            if pads_rows(self.setup, len(rows)):
                mask[:, -1] = 0
            batch |= {f"{name}_input_ids": torch.ones(shape, dtype=torch.long), f"{name}_attention_mask": mask}
            if self.typed:
                batch[f"{name}_token_type_ids"] = torch.zeros(shape, dtype=torch.long)
        if self.texts.loss == "pairs" and self.texts.columns == 2:
            batch["label"] = torch.ones(len(rows))
        return batch
