"""DeepSpeed's offloading: what stays on the device, what ranks have in host memory, and what is refused."""

import json
from pathlib import Path

import pytest

import memplan
from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.step.units.host_memory import flat_host_memory, pieces_host_memory
from memplan.units import round_up

EXAMPLES = Path(__file__).parents[1] / "trainers" / "examples"
ZERO = {"parallel.engine": "deepspeed", "master_weights": "fp32", "optimizer.default": "adamw-fp32"}
STATES = {"offload.optimizer_states": "cpu"}
ALL = {**STATES, "offload.weights": "cpu"}


def planned(stage, gpus=4, **keys):
    changed = {**ZERO, "parallel.zero_stage": stage, **keys}
    return plan_by_share("llama-3.2-1b", gpu="rtx4090", gpus=gpus, stack="trl", config="bf16-adamw", set=changed)


@pytest.mark.parametrize("stage", [1, 2])
def test_whole_weights_and_a_buffer_for_the_largest_gradient_stay(stage):
    on_device, offloaded = planned(stage), planned(stage, **STATES)
    states, host = offloaded.memory.states, offloaded.memory.host.components
    assert states.weight_bytes == on_device.memory.states.weight_bytes
    assert states.master_bytes == states.gradient_bytes == states.state_bytes == 0
    assert states.staged_bytes == 2 * 128_256 * 2048
    assert offloaded.memory.communication_bytes >= states.staged_bytes
    assert host["master_weights"] == host["optimizer_states"] // 2 == host["gradients"]
    assert host["master_weights"] == on_device.memory.states.master_bytes
    assert offloaded.instants["optimizer step"] < on_device.instants["optimizer step"]


def test_stage_3_keeps_pieces_of_weights_or_only_those_that_stay_gathered():
    on_device, states, everything = planned(3), planned(3, **STATES), planned(3, **ALL)
    kept = [plan.memory.states.weight_bytes for plan in (on_device, states, everything)]
    assert kept[0] == kept[1] > 20 * kept[2] > 0
    assert everything.memory.host.components["weights"] == round_up(kept[0] - kept[2], 2)
    assert states.memory.host.components.get("weights", 0) == 0
    assert everything.expected_bytes < states.expected_bytes < on_device.expected_bytes


def test_micro_steps_of_stage_2_sum_up_in_host_memory_and_those_of_stage_1_do_not():
    several = {"gradient_accumulation_steps": 4, **STATES}
    once, summed = planned(2, **STATES).memory.host.components, planned(2, **several).memory.host.components
    assert summed["gradients"] >= once["gradients"] + 2 * 128_256 * 2048
    assert planned(1, **several).memory.host.components == planned(1, **STATES).memory.host.components


@pytest.mark.parametrize("command", ["fit", "report"])
@pytest.mark.parametrize("nodes", [("--nodes", "2"), ("--gpus-per-node", "4")])
def test_a_node_has_the_host_memory_of_its_own_gpus_alone_however_their_number_is_said(cli, command, nodes):
    settings = [f"--set={key}={value}" for key, value in {**ZERO, **STATES, "parallel.zero_stage": 3}.items()]
    job = ("llama-3.2-1b", "--gpu", "rtx4090", "--config", "bf16-adamw", "--stack", "trl", *settings)
    host = cli(command, *job, "--gpus", "8", *nodes, "--json").data["host"]
    assert host["ranks_per_node"] == 4


def test_moments_are_never_pinned_and_weights_that_are_trained_always():
    flat = flat_host_memory([100], [60, 50], 60, 2, pinned=True)
    assert {part.component for part in flat.tensors if not part.pinned} == {"optimizer_states"}
    assert flat.bytes == 100 * 18 + 2 * 110 + 120
    assert flat_host_memory([100], [], 60, 2, pinned=False).pinned_bytes == 0
    pieces = pieces_host_memory([100], [100], [7], 2, pinned=False, pinned_frozen=False)
    assert {(part.component, part.bytes) for part in pieces.tensors if part.pinned} == {("weights", 200)}


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"offload.weights": "cpu", "parallel.zero_stage": 3}, "none beside weights in host memory"),
        ({**ALL, "parallel.zero_stage": 2}, "cpu counts with DeepSpeed's stage 3 alone"),
        ({"parallel.replicate": 2}, "groups that each divide everything"),
        ({**STATES, "optimizer.default": "sgd"}, "not what DeepSpeed steps in host memory"),
    ],
    ids=str,
)
def test_what_deepspeed_does_not_offload_so_is_refused(keys, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        planned(2, **keys)


def imported(tmp_path, zero):
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    return plan_by_share(str(EXAMPLES / "trl.yaml"), beside=[str(tmp_path / "ds.json")], gpu="h100", gpus=8)


def test_deepspeeds_json_says_what_is_offloaded_and_pinned(tmp_path):
    optimizer = {"device": "cpu", "pin_memory": False}
    stage3 = imported(tmp_path, {"stage": 3, "offload_optimizer": optimizer, "offload_param": {"device": "cpu"}})
    assert stage3.document().data["training"]["offload"] == {
        "weights": "cpu",
        "optimizer_states": "cpu",
        "activations": "none",
    }
    assert {part.component for part in stage3.memory.host.tensors if part.pinned} == {"weights"}
    stage2 = imported(tmp_path, {"stage": 2, "offload_optimizer": optimizer, "offload_param": {"device": "cpu"}})
    assert stage2.document().data["training"]["offload"]["weights"] == "none"
    assert stage2.memory.host.pinned_bytes == 0


def test_emitted_json_says_it_too():
    keys = {**ZERO, "parallel.zero_stage": 3, **ALL, "parallel.deepspeed.pinned_optimizer": "false", "stack": "trl"}
    settings = [f"{name}={value}" for name, value in keys.items()]
    text = memplan.emit("llama-3.2-1b", "deepspeed", config="bf16-adamw", set=settings)
    zero = json.loads(text)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}
