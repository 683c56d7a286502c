"""``memplan fit`` for mixtures whose experts GPUs share: torchtitan's expert parallelism."""

import pytest

import memplan
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share

JOB = {"gpu": "h100", "config": "mixed-adamw", "stack": "torchtitan"}
LAYERS, HIDDEN, WIDTH, EXPERTS, USED = 48, 2048, 768, 128, 8
"""Of Qwen3-30B-A3B."""


def plan(experts: int, gpus: int, *more: str, model: str = "qwen3-30b-a3b"):
    return plan_by_share(model, gpus=gpus, set=[f"parallel.expert={experts}", *more], **JOB)


@pytest.mark.parametrize(("experts", "gpus", "groups"), [(8, 64, 1), (16, 16, 1), (4, 32, 2), (8, 256, 1)])
def test_states_are_those_of_own_experts_and_of_shards_of_everything_else(experts, gpus, groups):
    memory = plan(experts, gpus, f"parallel.replicate={groups}").memory
    shards = gpus // groups
    again = shards // experts  # GPUs that have the same experts
    rest = sum(
        -(-t.shape[0] // shards) * (t.elements // t.shape[0]) * t.count
        for t in memory.model.inventory
        if t.role != "expert_matrix"
    )
    own = LAYERS * 3 * HIDDEN * WIDTH * EXPERTS // (experts * again)
    assert memory.states.weight_bytes == 4 * (rest + own)
    assert sum(t.elements * t.count for t in memory.model.inventory) == 30_532_122_624


def test_sharing_experts_gathers_fewer_of_them():
    layer = 3 * HIDDEN * WIDTH * EXPERTS * 2
    whole, shared = (plan(n, 64, "activation_checkpointing=full").memory for n in (1, 8))
    assert whole.communication_bytes > 2 * layer
    assert shared.communication_bytes < whole.communication_bytes // 2
    assert shared.requested_bytes < whole.requested_bytes


def test_one_gpu_for_all_experts_changes_nothing():
    alone = plan_by_share("qwen3-30b-a3b", gpus=64, **JOB)
    assert plan(1, 64).memory.instants == alone.memory.instants
    assert plan(1, 64).memory.device_bytes == alone.memory.device_bytes


def test_the_worst_routing_is_a_line_of_the_answer_and_a_plan_of_its_own():
    checkpointing = "activation_checkpointing=none"
    even, worst = (plan(8, 64, checkpointing, f"parallel.routing={way}").memory for way in ("even", "worst"))
    line = next(text for text in even.assumptions if "routed evenly" in text)
    assert memplan.units.format_bytes((worst.by_share or worst).device_bytes) in line
    kept = LAYERS * 2048 * (64 - USED) * 2 * (HIDDEN + 4 * WIDTH)  # rows that experts read and make, 64 of each token
    places = LAYERS * 2048 * (64 - USED) * 8
    assert dict(worst.instants)["loss backward"] - dict(even.instants)["loss backward"] == kept + places


def test_every_group_of_gpus_has_a_communicator():
    count = next(c for c in plan(8, 64).memory.components if c.name == "nccl_buffers")
    assert count.formula == "three NCCL communicators"


def test_ranks_that_share_experts_are_neighbours():
    answer = memplan.plan_ranks("qwen3-30b-a3b", gpus=24, set=["parallel.expert=8", "parallel.routing=even"], **JOB)
    assert [(row.first, row.last) for row in answer.rows][-1][1] == 23
    assert answer.rows[0].state_bytes > answer.rows[-1].state_bytes  # 16 experts of three neighbours: 6, 6 and 4


@pytest.mark.parametrize(
    ("experts", "gpus", "model", "words"),
    [
        (6, 60, "qwen3-30b-a3b", "6 GPUs do not share 128 experts of Qwen3-30B-A3B evenly; 4 do"),
        (5, 64, "qwen3-30b-a3b", "64 GPUs are no multiple of expert tensor x expert x pipeline = 5"),
        (8, 64, "llama-8b", "Llama-3.1-8B has no experts to share"),
    ],
)
def test_degrees_that_do_not_divide_are_one_line_with_what_does(experts, gpus, model, words):
    with pytest.raises(InvalidFileError, match=words):
        plan(experts, gpus, model=model)


def test_a_degree_of_a_config_that_is_no_divisor_of_its_gpus_is_refused():
    words = "8 GPUs are no divisor of the 12 of a group; 4 do"
    with pytest.raises(InvalidFileError, match=words):
        plan_by_share("qwen3-30b-a3b", set=["parallel.expert=8", "parallel.data=12", "parallel.zero_stage=3"], **JOB)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ("parallel.pipeline=2", "parallel.context=2", "kernels.attention=flex"),
            "it is not modelled where GPUs share sequences",
        ),
        (("parallel.reshard_after_forward=false",), "reshard_after_forward: it is not modelled"),
        (("evaluation=true",), "evaluation: it is not modelled where GPUs share experts"),
        (("zero_gradients=fill",), "does not go with experts whose rows are counted on the host"),
        (("parallel.expert_tensor=2",), "each of their matrices is whole on a GPU; use 1"),
        (("parallel.zero_stage=0",), "not how torchtitan shares experts"),
        (("stack=trl",), "expert parallelism is not modelled here"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(more, words):
    job = {**JOB, "stack": None} if more[0].startswith("stack") else JOB
    with pytest.raises(CannotAnswerError, match=words):
        plan_by_share("qwen3-30b-a3b", gpus=64, set=["parallel.expert=8", *more], **job)


def test_routing_says_something_where_experts_are_shared_alone():
    with pytest.raises(CannotAnswerError, match=r"parallel\.routing: worst counts where parallel\.expert"):
        plan(1, 64, "parallel.routing=worst")


FILE = """[model]
name = "qwen3"
flavor = "30B-A3B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
expert_parallel_degree = 8
expert_parallel_comm_backend = "standard"
[activation_checkpoint]
mode = "full"
"""


def test_a_file_of_torchtitan_says_it(tmp_path):
    path = tmp_path / "experts.toml"
    path.write_text(FILE)
    of_file = plan_by_share(str(path), gpu="h100", gpus=64).memory
    assert of_file.setup.config.parallel.expert == 8
    settings = {"activation_checkpointing": "full", "kernels.loss": "fp32", "sequence_length": 4096}
    assert of_file.instants == plan(8, 64, *(f"{key}={value}" for key, value in settings.items())).memory.instants
    path.write_text(FILE.replace("standard", "deepep"))
    with pytest.raises(CannotAnswerError, match="rows that DeepEP or other kernels"):
        plan_by_share(str(path), gpu="h100", gpus=64)


def test_gpus_that_share_matrices_share_experts_too():
    both = plan(8, 64, "parallel.tensor=4", "parallel.sequence=true").memory
    alone = plan(8, 64).memory
    assert (both.setup.config.parallel.data, both.setup.config.parallel.expert_shards) == (16, 8)
    experts = [next(e for e in m.states.tensors if e.tensor.role == "expert_matrix") for m in (both, alone)]
    assert experts[0].weight_bytes == experts[1].weight_bytes
    with pytest.raises(CannotAnswerError, match="use true, torchtitan's own default"):
        plan(8, 64, "parallel.tensor=4")


def test_suggest_shares_experts_where_a_model_has_some():
    options = {"gpu": "h100", "gpus": 64, "stack": "torchtitan", "most": 3}
    answer = memplan.suggest_layouts("qwen3-235b-a22b", **options)
    assert answer.verdict == "fits"
    assert all(row.memory.setup.config.parallel.expert > 1 for row in answer.rows)
    own = answer.document().data["rows"][0]["own_words"]
    assert {"parallelism.expert_parallel_degree: 4", "training.disable_cuda_graphs: true"} <= set(own)
    alone = memplan.suggest_layouts("qwen3-235b-a22b", set=["parallel.expert=1"], **options)
    assert alone.verdict == "no"
