"""Pipelines of torch: schedules beside torch's own tables and its own loops, layers of stages, and what a plan says of ranks."""

from itertools import product

import pytest

import memplan
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.errors import MemplanError
from memplan.library.answers.planned_job import plan_by_share
from memplan.step.pipelines.pipeline_schedules import (
    IN_ROUNDS,
    ONE_STAGE,
    V_SHAPED,
    actions_of,
    layers_of_stages,
    stages_of,
)
from memplan.step.pipelines.rank_timeline import most_pairs

NAMES = {
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
    "UNSHARD": "gather",
    "RESHARD": "release",
    "REDUCE_GRAD": "reduce",
}


def grids(order, ranks):
    """Yield pipelines of a schedule over so many ranks, those that it takes."""
    chunks = (1,) if order in ONE_STAGE else (2,) if order in V_SHAPED else (2, 3, 4)
    for virtual, together in product(
        chunks, sorted({ranks, ranks + 1, 2 * ranks, 2 * ranks + 1, 3 * ranks, 4 * ranks})
    ):
        if (order in IN_ROUNDS and together % max(1, together // ranks)) or (
            order == "dualpipev" and together < 2 * ranks
        ):
            continue
        yield Parallel(pipeline=ranks, virtual=virtual, schedule=order, micro_batches=together)


def own_tables(parallel):
    """Return what torch's own schedule has each rank do."""
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    count, x = parallel.pipeline * parallel.virtual, torch.zeros(1, 2)
    torch.distributed.init_process_group("fake", rank=0, world_size=parallel.pipeline, store=FakeStore())
    try:
        stages = [
            PipelineStage(torch.nn.Linear(2, 2), index, count, torch.device("cpu"), input_args=x, output_args=x)
            for index in stages_of(0, parallel)
        ]
        kind = schedules.get_schedule_class(NAMES[parallel.order])
        made = kind(stages[0] if parallel.virtual == 1 else stages, parallel.together, loss_fn=lambda y, _: y.sum())
    finally:
        torch.distributed.destroy_process_group()
    order = getattr(made, "pipeline_order_with_comms", made.pipeline_order)
    return [
        [part for one in order[rank] if one for part in one.sub_actions or [one]] for rank in range(parallel.pipeline)
    ]


def agree(order, ranks):
    """Assert that all ranks of all grids do what torch's tables say, in order; return how many there were."""
    seen = 0
    for parallel in grids(order, ranks):
        for rank, table in enumerate(own_tables(parallel)):
            theirs = [
                (
                    KINDS[one.computation_type.name],
                    one.stage_index,
                    -1 if one.microbatch_index is None else one.microbatch_index,
                )
                for one in table
                if one.computation_type.name in KINDS
            ]
            ours = [(one.kind, one.stage, one.micro_batch) for one in actions_of(rank, parallel)]
            if order == "gpipe":  # its table reduces nothing
                theirs, ours = ([one for one in side if one[0] != "reduce"] for side in (theirs, ours))
            assert sorted(ours) == sorted(theirs)
            in_order = ([one for one in side if one[0] != "release"] for side in (ours, theirs))
            assert next(in_order) == next(in_order)
            seen += 1
    return seen


@pytest.mark.parametrize("order", NAMES)
def test_every_rank_does_what_torchs_own_schedule_says(order):
    assert agree(order, 3) >= 12


@pytest.mark.slow
def test_every_rank_does_what_torchs_own_schedules_say_on_a_thousand_ranks():
    assert sum(agree(order, ranks) for order in NAMES for ranks in (2, 3, 4, 8, 16)) >= 1000


class Told:
    """A stage that notes what it is asked to do."""

    is_first = is_last = has_backward = False

    def __init__(self, index, count):
        self.stage_index, self.num_stages, self.done = index, count, []

    def forward_one_chunk(self, number, *_, **__):
        self.done.append(("forward", number))

    def backward_one_chunk(self, number, **_):
        self.done.append(("backward", number))

    def __getattr__(self, name):
        return lambda *_, **__: []


@pytest.mark.parametrize(("order", "name"), [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")])
def test_plain_schedules_do_what_torchs_loops_do_when_they_run(order, name):
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    for ranks, together in ((2, 2), (3, 7), (4, 4), (8, 11)):
        parallel = Parallel(pipeline=ranks, schedule=order, micro_batches=together)
        for rank in range(ranks):
            stage = Told(rank, ranks)
            own = getattr(schedules, name)(stage, together, loss_fn=lambda *_: None)
            own._initialize_stage = own._update_losses = own._maybe_compute_loss = lambda *_, **__: None
            own._step_microbatches([()] * together, [{}] * together)
            *ours, last = actions_of(rank, parallel)
            assert stage.done == [(one.kind, one.micro_batch) for one in ours]
            assert last.kind == "reduce"


def test_micro_batches_in_flight_are_the_schedules_known_numbers():
    for ranks, together in ((2, 4), (4, 8), (8, 32)):
        one = Parallel(pipeline=ranks, micro_batches=together)
        two = Parallel(pipeline=ranks, virtual=2, micro_batches=together)
        for rank in range(ranks):
            assert most_pairs(rank, one) == min(together, ranks - rank)
            assert most_pairs(rank, two) == min(2 * together, ranks + 2 * (ranks - 1 - rank) + 1)


def test_layers_are_divided_as_torchtitan_divides_them():
    assert layers_of_stages(32, Parallel(pipeline=4)) == (8, 9, 8, 7)
    assert layers_of_stages(16, Parallel(pipeline=2, virtual=2, first_stage_less_layers=0)) == (5, 4, 4, 3)
    assert sum(layers_of_stages(80, Parallel(pipeline=8, virtual=3))) == 80


JOB = {"config": "mixed-adamw", "stack": "torchtitan", "gpu": "h100", "sequence_length": 4096}


def test_the_fullest_rank_is_planned_and_every_rank_has_a_row():
    plan = memplan.plan("llama-8b", gpus=16, set=["parallel.pipeline=4", "parallel.virtual=2"], **JOB)
    rows = plan.to_dict()["ranks"]
    assert [row["layers"] for row in rows] == [[4, 4], [5, 4], [4, 4], [4, 3]]
    assert max(row["device_bytes"] for row in rows) == plan.expected_bytes
    alone = [
        memplan.plan(
            "llama-8b", gpus=16, set=["parallel.pipeline=4", "parallel.virtual=2", f"parallel.stage={n}"], **JOB
        )
        for n in range(4)
    ]
    assert [one.expected_bytes for one in alone] == [row["device_bytes"] for row in rows]


def test_the_fullest_rank_is_that_whose_reserve_as_simulated_makes_it_so():
    """By its share another rank of this pipeline is the fullest, 2.5 GiB below."""
    job = {"gpu": "h100", "gpus": 4, "config": "mixed-adamw", "stack": "torchtitan", "sequence_length": 4096}
    plan = memplan.plan(
        "qwen3-8b", set=["parallel.pipeline=2", "parallel.schedule=gpipe"], activation_checkpointing="full", **job
    )
    shares = [one.by_share.device_bytes for one in plan.memory.rank_plans]
    simulated = [one.device_bytes for one in plan.memory.rank_plans]
    assert shares.index(max(shares)) != simulated.index(max(simulated))
    assert plan.expected_bytes == max(simulated)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["pipeline=40"], "64 GPUs are no multiple"),
        (["pipeline=32", "virtual=2"], "32 layers do not fill 64 stages"),
        (["pipeline=4", "micro_batches=3"], "takes 4 at least"),
        (["pipeline=4", "virtual=2", "micro_batches=9"], "the nearest that do: 8"),
        (["pipeline=4", "schedule=gpipe", "virtual=2"], "gpipe gives each rank one stage"),
        (["virtual=2"], "it counts where parallel.pipeline is more than 1"),
        (["pipeline=4", "stage=4"], "expected a rank from 0 to 3"),
    ],
)
def test_pipelines_that_cannot_be_are_refused_by_name(settings, words):
    with pytest.raises(MemplanError, match=words):
        plan_by_share("llama-8b", gpus=64, set=[f"parallel.{one}" for one in settings], **JOB)


def test_a_pipeline_of_tied_embeddings_is_one_that_torchtitan_does_not_run():
    with pytest.raises(MemplanError, match=r"torchtitan .* runs no pipeline of a model whose head is its embedding"):
        plan_by_share("llama-3.2-1b", gpus=64, set=["parallel.pipeline=4"], **JOB)


def test_a_schedule_that_megatron_does_not_have_is_refused():
    with pytest.raises(MemplanError, match="Megatron-LM has no such setting"):
        memplan.plan_grid("llama-8b", gpu="h100", gpus=8, set=["parallel.pipeline=4", "parallel.schedule=gpipe"])


def test_one_rank_changes_nothing():
    plain = plan_by_share("llama-8b", gpus=8, **JOB).to_dict()
    one = plan_by_share("llama-8b", gpus=8, set=["parallel.pipeline=1"], **JOB).to_dict()
    assert {key for key in plain if plain[key] != one[key]} <= {"answer", "training"}  # the config is "changed"
