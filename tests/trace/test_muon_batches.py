"""``kernels.muon_batch_bytes``: the formula of batches against a trace, and against a step that the optimizer runs."""

import pytest
import torch

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Gradients, Offload
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.model import Model
from memplan.model.spec import Attention, Layer, LayerRun, Mlp, ModelSpec, Norm
from memplan.muon.updates import batches
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.step.states.optimizer_scratch import step_temporaries
from memplan.trace.jobs.bundled_optimizer import BundledUpdate
from memplan.trace.jobs.reference_job import Session
from memplan.trace.tracer import trace_training
from tests.muon.memory import LiveStorages, tensors_of

LAYERS, WIDTH, INNER = 3, 128, 384
BUDGETS = (0, 1, 300_000, 700_000, 1_500_000, 2_500_000, 2**30)
MOMENTA = ("fp32", "bf16", "int8", "int4", "gauss4", "gauss2", "ternary")


@pytest.fixture(scope="module")
def small() -> Model:
    layer = Layer(Attention(4, 2, 32, 32), Mlp(INNER), Norm())
    return Model.from_spec(ModelSpec("small", "llama", 96, WIDTH, (LayerRun(layer, LAYERS),), Norm()), "test")


def keys(momentum="int8", budget=0, newton_schulz="min", weights="bf16", **others):
    kernels = Kernels(newton_schulz=newton_schulz, muon_batch_bytes=budget)
    optimizer = {"hidden_matrix": f"muon-{momentum}", "default": "adamw-fp32"}
    return {
        "optimizer": optimizer,
        "weights": {"default": weights},
        "kernels": kernels,
        "sequence_length": 16,
        **others,
    }


@pytest.mark.parametrize(
    ("ranks", "momentum", "budget"), [(2, "fp32", 0), (3, "gauss4", 300_000), (16, "int8", 0), (5, "bf16", 2_500_000)]
)
def test_a_round_of_shared_matrices_takes_what_the_trace_of_a_replica_does(
    catalog, small, make_setup, ranks, momentum, budget
):
    setup = make_setup(**keys(momentum, budget, parallel=Parallel(data=ranks, shared_muon=True)))
    plan = CompiledPlan(small, setup).evaluate(Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb"))
    traced = trace_training(small, setup)
    assert dict(plan.instants)["optimizer step"] == traced.instant_bytes["optimizer step"]


@pytest.mark.parametrize("parallel", [Parallel(shared_muon=True), Parallel(data=2, zero_stage=3, shared_muon=True)])
def test_matrices_are_shared_by_replicas_alone(small, make_setup, parallel):
    with pytest.raises(CannotAnswerError, match=r"shared_muon.*all have the weights"):
        make_setup(**keys("int8", parallel=parallel))


@pytest.mark.thorough
@pytest.mark.one_in(4)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("momentum", MOMENTA)
def test_a_step_on_the_cpu_takes_the_bytes_that_the_planner_says(small, make_setup, monkeypatch, momentum, budget):
    """The optimizer's own step, multiplying batches as it does on a GPU, on tensors that have memory."""
    monkeypatch.setattr(batches, "in_one_product", lambda *_: True)
    setup = make_setup(**keys(momentum, budget, "fast" if budget % 3 else "min"))
    session = Session(small.spec, setup, device="cpu", target="cpu")
    states = CompiledPlan(small, setup).states.tensors
    (update,) = [update for items, update in session.updates if items[0].role == "hidden_matrix"]
    assert isinstance(update, BundledUpdate)
    update.optimizer.param_groups[0]["ns_steps"] = 1  # each iteration takes and gives back the same
    tensors = [handle.key for handle, _ in update.optimizer.handles()]
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    before = [tensor.clone() for tensor in tensors]
    with LiveStorages(
        tensors_of([tensors, [t.grad for t in tensors], list(update.optimizer.state.values())])
    ) as memory:
        update.step()
    planned = step_temporaries(setup, [entry for entry in states if entry.optimizer.orthogonalises])
    assert memory.extra == planned.bytes
    assert not any(torch.equal(one, other) for one, other in zip(before, tensors, strict=True))


def test_every_budget_above_is_another_way_to_cut_and_none_is_exceeded(small, make_setup):
    sizes = []
    for budget in BUDGETS:
        setup = make_setup(**keys("int8", budget))
        sizes.append(step_temporaries(setup, CompiledPlan(small, setup).states.tensors).bytes)
    assert sizes[0] == sizes[1]
    assert len(set(sizes)) >= 4
    assert all(size <= max(budget, sizes[0]) for size, budget in zip(sizes, BUDGETS, strict=True))


CASES = {
    "bf16": keys("int4", 1_500_000),
    "all at once, fast": keys("bf16", 2**30, "fast"),
    "fp32 weights": keys("fp32", 1_500_000, weights="fp32"),
    "master weights": keys("gauss2", 2_500_000, master_weights="fp32"),
    "gradients in a store": keys("int8", 2**30, gradients=Gradients("fp8-e4m3")),
    "inside backward": keys("int8", 2**30, gradients=Gradients(None, "layer")),
    "codes": keys("int4", 2**30, weights="q4-0"),
    "states on the host": keys("int8", 2**30, offload=Offload(optimizer_states="cpu")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_traced_step_is_what_the_formula_says(small, make_setup, catalog, case):
    setup = make_setup(**CASES[case])
    plan = CompiledPlan(small, setup).evaluate(Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb"))
    trace = trace_training(small, setup)
    assert trace.notes == ()
    if setup.config.gradients.lifetime == "layer":
        assert plan.requested_bytes == trace.peak_bytes
    else:
        assert dict(plan.instants)["optimizer step"] == trace.instant_bytes["optimizer step"]


def test_settings_that_nothing_runs_are_refused(small, make_setup):
    with pytest.raises(InvalidFileError, match="muon_batch_bytes: expected a whole number of bytes"):
        make_setup(**keys(budget=-1))
    setup = make_setup(**keys("bf16", 2**20, "torch"))
    with pytest.raises(CannotAnswerError, match="muon_batch_bytes is the bundled optimizer's"):
        _ = CompiledPlan(small, setup).states
