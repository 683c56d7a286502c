"""Reference models: the parameters of the inventory, and numbers that make sense."""

import pytest
import torch

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter
from memplan.model.families import with_towers
from memplan.model.parameter_tensors import inventory_of
from memplan.trace.jobs.reference_job import Session
from memplan.trace.reference.decoder import ReferenceModel
from memplan.trace.reference.run_options import ReferenceOptions
from tests.jobs import shipped_catalog
from tests.survey.drawn_models import NOT_BUNDLED

CATALOG = shipped_catalog()
FP32 = {"weights": {"default": "fp32"}, "compute_dtype": "fp32"}
ALL = sorted(
    name for name, entry in CATALOG.models.entries.items() if entry.architecture not in (*NOT_BUNDLED, *with_towers())
)
"""Models that the bundled stack has code for, and trains whole."""
FAMILIES = {CATALOG.models[name].architecture: name for name in reversed(ALL)}


def check_parameters(spec):
    built = {name: tuple(t.shape) for name, t in ReferenceModel(spec, ReferenceOptions()).named_parameters()}
    expected = {name: t.shape for t in inventory_of(spec) for name in t.expanded_names()}
    assert built == expected


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_parameters_equal_the_inventory(make_model, name):
    check_parameters(make_model(name).spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_parameters_of_every_model_equal_the_inventory(make_model, name):
    check_parameters(make_model(name).spec)


@pytest.mark.parametrize("name", sorted(FAMILIES.values()))
def test_a_narrow_model_of_every_family_learns(make_model, make_setup, shrunk, name):
    spec = shrunk(make_model(name)).spec
    if name.startswith(("deepseek", "gpt-oss", "mixtral", "qwen1.5-moe", "qwen2-57b", "qwen3-235b", "qwen3-30b")):
        setup = make_setup(micro_batch_size=1, sequence_length=32, optimizer={"default": "sgd"})
    else:
        setup = make_setup(
            micro_batch_size=1,
            sequence_length=32,
            weights={"default": "fp32"},
            compute_dtype="fp32",
            optimizer={"default": "sgd"},
        )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    session = Session(spec, setup, device="cpu", target="cpu")
    first = session.loss()
    first.backward()
    assert torch.isfinite(first)
    with torch.no_grad():
        for item in session.trained:
            assert item.tensor.grad is not None, item.name
            item.tensor.sub_(item.tensor.grad)
        assert session.loss() < first


@pytest.mark.parametrize(
    "kernels",
    [Kernels(rotary="fused", activation="fused"), Kernels(loss="chunked"), Kernels(loss="fp32", norm="composite")],
)
def test_kernels_agree_with_one_another(make_model, make_setup, kernels):
    losses, gradients = [], []
    for choice in (Kernels(), kernels):
        torch.manual_seed(0)
        session = Session(
            make_model("tiny").spec, make_setup(kernels=choice, sequence_length=64, **FP32), device="cpu", target="cpu"
        )
        loss = session.loss()
        loss.backward()
        losses.append(loss.detach())
        gradients.append([item.tensor.grad for item in session.trained])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointing_changes_no_gradient(make_model, make_setup, kind):
    gradients = []
    for checkpointing in ("none", kind):
        torch.manual_seed(0)
        setup = make_setup(
            sequence_length=64,
            weights={"default": "fp32"},
            compute_dtype="fp32",
            activation_checkpointing=checkpointing,
        )
        session = Session(make_model("tiny").spec, setup, device="cpu", target="cpu")
        session.loss().backward()
        gradients.append([item.tensor.grad for item in session.trained])
    torch.testing.assert_close(*gradients)


def test_adapters_have_the_names_that_peft_gives_them(make_model):
    options = ReferenceOptions(adapter=Adapter("dora", 4, ("q_proj",)))
    trained = {
        name: tuple(t.shape)
        for name, t in ReferenceModel(make_model("tiny").spec, options).named_parameters()
        if t.requires_grad
    }
    prefix = "model.layers.0.self_attn.q_proj"
    assert trained[f"{prefix}.lora_A.weight"] == (4, 64)
    assert trained[f"{prefix}.lora_B.weight"] == (64, 4)
    assert trained[f"{prefix}.lora_magnitude_vector.weight"] == (64,)
    assert len(trained) == 6
