"""Shards in host memory: what stays on the device, what a node's host has to have, and what is refused."""

import pytest

import memplan
from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.step.units.host_memory import HostMemory, HostTensors, host_memory
from memplan.units import GIB

OFFLOADED = {"offload.weights": "cpu", "offload.optimizer_states": "cpu"}
MIXED = {"parallel.zero_stage": 3, "weights.default": "fp32", "optimizer.default": "adamw-fp32"}
FLAT = {"parallel.engine": "fsdp1"}


def planned(gpus=4, host=None, **keys):
    return plan_by_share(
        "llama-3.2-1b",
        gpu="rtx4090",
        gpus=gpus,
        stack="trl",
        config="bf16-adamw",
        set={**MIXED, **keys},
        host_memory=host,
    )


@pytest.fixture(scope="module", params=[{}, FLAT], ids=["fsdp2", "fsdp1"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def pair(engine):
    return planned(**engine), planned(**engine, **OFFLOADED)


def test_nothing_that_persists_stays_on_the_device(pair):
    on_device, offloaded = pair
    assert on_device.memory.persistent_bytes > 0
    assert offloaded.memory.persistent_bytes == 0
    assert offloaded.expected_bytes < on_device.expected_bytes
    assert offloaded.instants["optimizer step"] < 2**20 < on_device.instants["optimizer step"]


def test_host_memory_has_what_the_device_had(pair):
    on_device, offloaded = pair
    states, host = on_device.memory.states, offloaded.memory.host
    assert host.components["weights"] == states.weight_bytes
    assert host.components["gradients"] == states.gradient_bytes
    assert host.components["optimizer_states"] == states.state_bytes + states.host_bytes
    assert offloaded.host_bytes == host.bytes == sum(part.bytes for part in host.tensors)


def test_only_shards_and_gradients_are_pinned(pair):
    _, offloaded = pair
    assert {part.component for part in offloaded.memory.host.tensors if part.pinned} == {"weights", "gradients"}


def test_flat_tensors_have_a_gradient_in_host_memory_though_they_are_frozen():
    lora = {"adapter.kind": "lora", "adapter.rank": "8", "adapter.dtype": "fp32", "weights.default": "bf16"}
    host = planned(**FLAT, **OFFLOADED, **lora).memory.host
    assert host.components["gradients"] == host.components["weights"]
    host = planned(**OFFLOADED, **lora).memory.host
    assert 0 < 20 * host.components["gradients"] < host.components["weights"]


def test_codes_that_every_rank_has_whole_stay_on_the_device():
    plan = planned(
        **{
            **OFFLOADED,
            "adapter.kind": "lora",
            "adapter.dtype": "fp32",
            "weights.default": "bf16",
            "weights.hidden_matrix": "nf4-dq",
        }
    )
    assert 2**28 < plan.memory.states.weight_bytes < 2**30
    assert plan.memory.host.components["weights"] > 0


def test_the_root_is_copied_once_more_as_backward_begins_while_it_is_whole():
    row = {
        **FLAT,
        **OFFLOADED,
        "adapter.kind": "lora",
        "adapter.dtype": "fp32",
        "micro_batch_size": 1,
        "sequence_length": 16,
    }
    root = 128_256 * 2_048 + 2_048  # a tied embedding, and the final norm
    rest = planned(**row).instants["loss backward"] - 2 * root - (4 + 2) * root // 4  # a piece in fp32, and cast
    assert 0 < rest < 2**21  # what 16 tokens have saved


@pytest.mark.parametrize(("gpus", "ranks"), [(4, 4), (8, 8), (64, 8)])
def test_the_ranks_of_a_node_share_its_host(gpus, ranks):
    data = planned(gpus, **OFFLOADED).to_dict()["host"]
    assert data["ranks_per_node"] == ranks
    assert data["node_bytes"] == ranks * data["taken_bytes"]
    assert data["taken_bytes"] >= data["bytes"] == sum(part["bytes"] for part in data["components"])


def test_a_host_that_is_too_small_is_no_and_one_that_is_not_changes_nothing():
    need = planned(**OFFLOADED).memory.node_host_bytes
    small, enough = (planned(host=f"{size / GIB:.6f}GiB", **OFFLOADED) for size in (need - 2**20, need + 2**20))
    assert (small.verdict, enough.verdict) == ("no", "fits")
    assert not planned(host=f"{need} B", **OFFLOADED).memory.exceeds_host
    assert small.expected_bytes == enough.expected_bytes
    assert "of host memory on a node of 4 GPUs" in small.sentence
    assert small.to_dict()["host"]["limit_bytes"] < need


def test_states_of_one_gpu_are_held_against_the_host_too(cli):
    job = ("fit", "llama-3.2-1b", "-g", "h100", "-c", "bf16-adamw", "--set", "offload.optimizer_states=cpu")
    small, enough = cli(*job, "--host-memory", "4GiB"), cli(*job, "--host-memory", "8GiB")
    assert (small.exit_code, enough.exit_code) == (1, 0)
    assert "4.60 GiB of pinned host memory; there are 4.00 GiB" in small.out
    sentence = cli(*job, "--host-memory", "4GiB", "--json").data["answer"]
    assert "4.60 GiB of host memory on a node of 1 GPU, which has 4.00 GiB" in sentence


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_job_that_a_host_is_too_small_for_is_told_only_what_makes_it_fit(gpus):
    keys = {"offload.optimizer_states": "cpu"} if gpus == 1 else {**MIXED, **OFFLOADED}
    stack = "bundled" if gpus == 1 else "trl"
    plan = memplan.plan(
        "llama-3.2-1b", gpu="h100", gpus=gpus, stack=stack, config="bf16-adamw", set=keys, host_memory="4GiB"
    )
    assert plan.verdict == "no"
    assert plan.suggestions
    assert all(change.flips_verdict for change in plan.suggestions)


def test_pinned_tensors_are_rounded_up_to_powers_of_two():
    parts = [HostTensors("weights", 5_000, 2, pinned=True), HostTensors("optimizer_states", 5_000, 2, pinned=False)]
    memory = host_memory([*parts, HostTensors("weights", 5_000, 1, pinned=True), HostTensors("weights", 0, 9, True)])
    assert memory == HostMemory((HostTensors("weights", 5_000, 3, True), parts[1]))
    assert (memory.bytes, memory.pinned_bytes, memory.taken_bytes) == (25_000, 24_576, 34_576)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"offload.weights": "cpu"}, "offload.optimizer_states: none is not how shards are offloaded"),
        ({"offload.optimizer_states": "cpu"}, "offload.weights: none is not how shards are offloaded"),
        ({**OFFLOADED, "stack": "torchtitan"}, "not under torchtitan; use --stack trl"),
        ({**OFFLOADED, "parallel.zero_stage": 0}, "offloading weights to the host is not modelled"),
        ({**OFFLOADED, "offload.activations": "cpu"}, "offload.activations: cpu is not supported on several GPUs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_offloaded_so_is_refused(keys, reason):
    stack = keys.get("stack", "trl")
    settings = {**MIXED, **{key: value for key, value in keys.items() if key != "stack"}}
    with pytest.raises(CannotAnswerError) as caught:
        plan_by_share("llama-3.2-1b", gpu="rtx4090", gpus=4, stack=stack, config="bf16-adamw", set=settings)
    assert reason in str(caught.value)
