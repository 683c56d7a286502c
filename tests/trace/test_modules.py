"""Tracing modules that are not ours: transformers' implementations and a user's own."""

import json
from typing import Any

import pytest
import torch

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter
from memplan.errors import CannotAnswerError
from memplan.trace.modules import imported_factory, trace_huggingface, trace_module
from memplan.trace.tracer import trace_training

nn: Any = torch.nn


TRANSFORMERS = Kernels(norm="composite", optimizer="fused", loss="fp32")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 1000)

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.head(x)


class ReadsValues(Own):
    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        if x.sum().item() > 0:
            x = -x
        return self.head(x)


class Broken(Own):
    def forward(self, ids: Any) -> Any:
        return self.head(torch.cat((self.table(ids), self.table(ids)), -1))


class Silent(Own):
    def forward(self, ids: Any) -> None:
        self.table(ids)


def not_a_module() -> int:
    return 3


def raising() -> nn.Module:
    raise RuntimeError("no\nsuch thing")


def test_an_own_module_is_traced_with_its_layers(make_setup):
    trace = trace_module(Own, make_setup(sequence_length=64))
    weights = 2 * sum(tensor.numel() for tensor in Own().parameters())
    assert trace.instants["forward"].components["weights"] == weights
    assert trace.persistent_bytes >= 4 * weights
    assert [name for name in trace.instants if name.startswith("layer")] == [
        "layer 3 backward",
        "layer 2 backward",
        "layer 1 backward",
    ]
    assert trace.instants["forward"].components["logits"] > 0
    lines = {s.line for s in trace.storages if s.component == "activations"}
    assert any(line.startswith("trace/test_modules.py:") for line in lines)


def test_a_factory_is_found_by_its_name():
    assert imported_factory("collections:OrderedDict.fromkeys") is not None


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (Broken, "forward or backward of Broken failed at test_modules.py"),
        (ReadsValues, "needs the values of a tensor"),
        (Silent, "returned NoneType"),
        (not_a_module, "returned int, not a torch.nn.Module"),
        (raising, "building raising failed at test_modules.py"),
        ("no_such_package.module:factory", "cannot import no_such_package.module:factory"),
        ("collections:no_such_name", "cannot import collections:no_such_name"),
        ("collections", "is not a factory"),
        ("math:pi", "is not callable"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_one_line(make_setup, factory, words):
    with pytest.raises(CannotAnswerError) as caught:
        trace_module(factory, make_setup(sequence_length=64))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keys", [{"adapter": Adapter()}, {"weights": {"default": "q4-0", "norm": "fp32"}}])
def test_what_only_catalog_models_have_is_refused(make_setup, keys):
    with pytest.raises(CannotAnswerError, match="catalog models only"):
        trace_module(Own, make_setup(**keys))


FULL_SIZE = ("llama-3.2-1b", "qwen3-0.6b", "mixtral-8x7b-v0.1", "gemma-2b")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw-bf16", "sgd"])
@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_reference_equals_transformers_at_full_size(make_model, make_setup, catalog, tmp_path, name, optimizer):
    pytest.importorskip("transformers")
    entry = catalog.models[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": entry.architecture, **entry.config}))
    setup = make_setup(kernels=TRANSFORMERS, optimizer={"default": optimizer}, sequence_length=1024)
    real, ours = trace_huggingface(tmp_path, setup), trace_training(make_model(name), setup)
    assert abs(ours.peak_bytes - real.peak_bytes) <= 1e-4 * real.peak_bytes
    assert ours.peak_instant == real.peak_instant


@pytest.mark.slow
def test_checkpointing_is_that_of_transformers(make_model, make_setup, catalog, tmp_path):
    pytest.importorskip("transformers")
    entry = catalog.models["llama-3.2-1b"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": entry.architecture, **entry.config}))
    setup = make_setup(kernels=TRANSFORMERS, activation_checkpointing="full", micro_batch_size=2)
    real, ours = trace_huggingface(tmp_path, setup), trace_training(make_model("llama-3.2-1b"), setup)
    assert abs(ours.peak_bytes - real.peak_bytes) <= 1e-4 * real.peak_bytes
