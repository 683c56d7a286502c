"""What ranks keep under Megatron-LM's rarer flags, as a script that shares no line with the plan counted it from megatron-core 0.16.1."""

from dataclasses import replace

import pytest

import memplan
from memplan.errors import InvalidFileError, MemplanError
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_states import MegatronSettings, megatron_states
from memplan.step.grids.megatron_tensors import MegatronBuild
from tests.grids.megatron_jobs import drawn
from tests.grids.planned_ranks import grid_of_job, spec_of, split_of

SMALL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --max-position-embeddings 1024"
    " --seq-length 1024 --micro-batch-size 1 --bf16 --use-distributed-optimizer"
)
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 616 --moe-token-dispatcher-type alltoall"
NARROW = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
BUCKETS = "--ffn-hidden-size 1000 --overlap-grad-reduce --ddp-num-buckets"
COUNTED = {
    f"{BUCKETS} 7": (
        24,
        {0: (155145216, 310290432, 12928768, 25857536), 23: (155145216, 310290432, 12926720, 25853440)},
    ),
    f"{BUCKETS} 5 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2": (
        24,
        {0: (130130688, 260261376, 21688448, 43376896), 23: (128037120, 256074240, 21339008, 42678016)},
    ),
    f"{EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel": (
        24,
        {0: (90868992, 181737984, 18515680, 37031360), 12: (90868992, 181737984, 18516128, 37032256)},
    ),
    f"{EXPERTS} --expert-model-parallel-size 4 --disable-bias-linear --swiglu": (
        24,
        {0: (169054464, 338108928, 21657280, 43314560), 23: (169054464, 338108928, 21656768, 43313536)},
    ),
    f"{EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 4 --swiglu --softmax-type learnable --position-embedding-type yarn": (
        24,
        {0: (167027712, 334055424, 21497184, 42994368), 23: (167027712, 334055424, 21497216, 42994432)},
    ),
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --use-tp-pp-dp-mapping": (
        24,
        {
            0: (78945024, 157890048, 26315008, 52630016),
            2: (76851456, 153702912, 25617152, 51234304),
            23: (76851456, 153702912, 25616640, 51233280),
        },
    ),
    "--use-precision-aware-optimizer --exp-avg-dtype bf16": (8, {0: (205893632, 411787264, 25736704, 77210112)}),
    f"{NARROW} --fp8-format e4m3 --fp8-recipe blockwise": (8, {0: (205893632, 411787264, 51473408, 51473408)}),
    "--optimizer-cpu-offload": (8, {0: (205893632, 411787264, 51473408, 0)}),
    "--optimizer-cpu-offload --use-precision-aware-optimizer": (8, {0: (205893632, 411787264, 0, 0)}),
    f"{NARROW} --fp8-format hybrid --fp8-recipe delayed": (8, {0: (205893632, 411787264, 25736704, 51473408)}),
}
"""Flags -> GPUs, and of some ranks bytes of weights, gradients, copies and moments."""


def script_of(folder, gpus, flags):
    """Return a launch script of so many GPUs."""
    script = folder / "train.sh"
    script.write_text(f"torchrun --nproc_per_node 8 --nnodes {gpus // 8} pretrain_gpt.py {SMALL} {flags}\n")
    return script


@pytest.mark.parametrize("flags", COUNTED)
def test_ranks_keep_what_was_counted(tmp_path, flags):
    gpus, ranks = COUNTED[flags]
    plan = memplan.plan_grid(script_of(tmp_path, gpus, flags), gpu="h100").plan
    for rank, counted in ranks.items():
        own = plan.rank(rank)
        assert (own.weights, own.gradients, own.master_weights, own.optimizer_states) == counted
    assert bool(plan.unplanned) == ("fp8" in flags or "learnable" in flags)


MUON = {
    4: ((105184, 210368, 19584, 19968), (105184, 210368, 210368, 307840)),
    5: ((960288, 1920576, 166304, 166720), (960288, 1920576, 1920576, 2019456)),
    9: ((430080, 860160, 459264, 460800), (430080, 860160, 860160, 1158144)),
}
"""Seed of a drawn job -> what its last rank keeps with ``dist_muon`` and with ``muon``: of megatron-core 0.16.1's own optimizers."""


@pytest.mark.parametrize("seed", MUON)
def test_matrices_have_a_momentum_whole_or_on_one_rank_each(seed):
    job = replace(drawn(seed), sharded=False, bucket=0, replicate=1)
    for muon, counted in zip(("shared", "whole"), MUON[seed], strict=True):
        settings = MegatronSettings(split_of(job), MegatronBuild("local", job.multiple), muon=muon)
        own = megatron_states(spec_of(job), grid_of_job(job), settings)[-1].rank(job.world // job.pipeline - 1)
        assert (own.weights, own.gradients, own.master_weights, own.optimizer_states) == counted


def test_muon_is_refused_with_what_it_does_not_take(tmp_path):
    flags = "--num-experts 4 --moe-ffn-hidden-size 64 --optimizer"
    with pytest.raises(MemplanError, match=r"Muon takes parallel\.zero_stage: 0"):
        memplan.plan_grid(script_of(tmp_path, 8, f"{flags} dist_muon"), gpu="h100")
    with pytest.raises(MemplanError, match="which Megatron-LM gives to Muon"):
        memplan.plan_grid(
            script_of(tmp_path, 8, f"--pipeline-model-parallel-size 2 --mtp-num-layers 1 {flags} muon"), gpu="h100"
        )
    with pytest.raises(MemplanError, match="another Muon than muon and dist_muon"):
        memplan.plan_grid(script_of(tmp_path, 8, f"{flags} adaptive_muon"), gpu="h100")


def test_chunks_that_micro_batches_do_not_fill_are_refused():
    settings = {"parallel.pipeline": 4, "parallel.virtual": 2, "parallel.micro_batches": 3}
    with pytest.raises(InvalidFileError, match="3 do not fill 4 stages of 2 chunks each"):
        memplan.plan_grid("llama-8b", gpu="h100", gpus=8, stack="megatron", set=settings)


def test_a_script_of_replicas_alone_is_a_grid_too(cli, tmp_path):
    file = tmp_path / "train.sh"
    flags = SMALL.replace("--use-distributed-optimizer", "--overlap-grad-reduce")
    file.write_text(f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {flags}\n")
    ran = cli("fit", str(file), "--gpu", "h100", "--json")
    assert (ran.exit_code, ran.data["parallel"]["data"]) == (0, 8)


def test_buckets_are_sized_or_counted_and_not_both(tmp_path):
    with pytest.raises(InvalidFileError, match="buckets and bucket_elements both"):
        memplan.plan_grid(script_of(tmp_path, 8, f"{BUCKETS} 5 --ddp-bucket-size 100000"), gpu="h100")


@pytest.mark.parametrize(
    ("key", "value"), [("bucket_elements", -5), ("buckets", 0), ("predicted_tokens", -1), ("micro_batch_group", -1)]
)
def test_numbers_that_megatron_would_not_take_are_refused(key, value):
    with pytest.raises(
        InvalidFileError, match=rf"parallel\.megatron\.{key}: expected a whole number from [01] to .*, got {value}"
    ):
        memplan.plan_grid("llama-8b", gpu="h100", gpus=8, set={f"parallel.megatron.{key}": value})


def test_stages_alternate_only_where_experts_are_divided_as_the_rest_is(tmp_path):
    flags = "--pipeline-model-parallel-size 2 --context-parallel-size 2 --use-tp-pp-dp-mapping"
    assert memplan.plan_grid(script_of(tmp_path, 8, flags), gpu="h100").plan.grid.alternating
    with pytest.raises(InvalidFileError, match="tensor x context = 2, and expert tensor x expert = 4"):
        memplan.plan_grid(script_of(tmp_path, 8, f"{flags} {EXPERTS} --expert-model-parallel-size 4"), gpu="h100")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--optimizer lion", "an optimizer that Megatron-LM does not have"),
        ("--global-batch-size 7", "7 sequences a step are no multiple of 1 of a micro-batch x 8 .* = 8; .* that is: 8"),
        ("--global-batch-size 0", "global_batch_size: expected a whole number, at least 1, got 0"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "expected a divisor of 2 layers of a stage, got 3"),
        ("--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2", "takes one of"),
    ],
)  # fmt: skip
def test_flags_at_which_megatron_stops_are_refused(tmp_path, flags, words):
    with pytest.raises(MemplanError, match=words):
        memplan.plan_grid(script_of(tmp_path, 8, flags), gpu="h100")


@pytest.mark.parametrize("alternating", [False, True])
def test_every_rank_has_a_place_of_its_own(alternating):
    grid = Grid(48, tensor=2, pipeline=3, context=2, expert=4, alternating=alternating)
    places = [grid.place_of(rank) for rank in range(48)]
    assert [grid.rank_at(*place) for place in places] == list(range(48))
    assert sorted(places) == [(stage, place) for stage in range(3) for place in range(16)]
    assert (places[4][0], places[15][0]) == ((1, 0) if alternating else (0, 0))


def test_neighbours_of_a_stage_are_shown(cli):
    settings = ("--tp", "2", "--pp", "4", "--zero", "1", "--set", "parallel.megatron.alternating=true")
    ran = cli("fit", "llama-8b", "--gpus", "64x h100", *settings)
    assert "\n1-2    2-5, ...  8 layers " in ran.out
    stages = cli("fit", "llama-8b", "--gpus", "64x h100", *settings, "--json").data["stages"]
    assert [(stage["first_rank"], stage["last_rank"]) for stage in stages] == [(0, 57), (2, 59), (4, 61), (6, 63)]
