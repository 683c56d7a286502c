"""What layers of Megatron-LM keep at least, beside what its own modules left: ``megatron_steps.py`` made the record."""

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.model.spec import Attention, Layer, Mlp, ModelSpec, Norm, layer_runs
from memplan.step.grids.grid import Grid
from memplan.step.grids.megatron_layers import MegatronBatch, RankSizes
from memplan.step.grids.megatron_peaks import least_activations, pairs_in_flight
from memplan.step.grids.megatron_tensors import MegatronBuild
from memplan.step.grids.pipeline_stages import chunks_of
from memplan.step.pipelines.pipeline_schedules import actions_of
from tests.grids.megatron_steps import MegatronStep
from tests.grids.planned_steps import counted, planned

RECORD = json.loads((Path(__file__).parent / "megatron-steps-0.16.1.json").read_text())
JOBS = [(MegatronStep(**row["job"]), row["traced"]) for row in RECORD["jobs"]]


def test_what_is_counted_is_what_megatrons_modules_leave():
    assert len(JOBS) >= 40
    for job, traced in JOBS:
        assert counted(job) == traced["left"], job
        assert traced["logits"] + traced["left"] <= traced["activations"]


def test_what_is_counted_is_no_more_than_a_step_has():
    for job, traced in JOBS:
        assert 0.2 * traced["activations"] < planned(job) <= traced["activations"], job


def test_pairs_in_flight_are_those_of_the_schedules():
    for stages, chunks, rounds in product((2, 4, 8), (1, 2, 3), (1, 3)):
        together = stages * rounds
        parallel = Parallel(pipeline=stages, virtual=chunks, micro_batches=together)
        for rank in range(stages):
            flying, most = Counter(), 0
            for action in actions_of(rank, parallel):
                flying["pairs"] += {"forward": 1, "backward": -1}.get(action.kind, 0)
                most = max(most, flying["pairs"])
            assert pairs_in_flight(Grid(stages, pipeline=stages, virtual=chunks), rank, together) == most


def layers(grid, *modules, full=False, tokens=1024, micro_batches=8):
    layer = Layer(Attention(32, 8, 128, 128), Mlp(14336), Norm())
    spec = ModelSpec("llama", "llama", 128256, 4096, layer_runs([layer] * 32), Norm())
    batch = MegatronBatch(1, tokens, micro_batches, full, frozenset(modules))
    return least_activations(RankSizes(spec, grid, MegatronBuild(), batch), chunks_of(32, grid))


def test_degrees_divide_what_they_divide():
    tokens, logits = 1024, 1024 * 128256 * 6
    matrices = 2 * tokens * (2 * 4096 + 2 * 1024 + 3 * 14336)
    stream = 2 * tokens * 4096
    assert layers(Grid(1)) == (32 * (4 * stream + matrices) + logits,)
    assert layers(Grid(2, tensor=2)) == (32 * (4 * stream + matrices // 2) + logits // 2,)
    assert layers(Grid(2, tensor=2, sequence=True)) == (32 * (4 * stream + matrices) // 2 + logits // 2,)
    assert layers(Grid(2, context=2)) == (32 * (4 * stream + matrices) // 2 + logits // 2,)
    piped = layers(Grid(4, pipeline=4))
    assert piped[:3] == tuple(count * 8 * (4 * stream + matrices) for count in (4, 3, 2))
    assert layers(Grid(1), full=True) == (32 * stream + logits,)
    assert layers(Grid(4, pipeline=4), full=True)[0] == 4 * 8 * stream + 3 * stream + matrices
    assert layers(Grid(1), "core_attn") == layers(Grid(1))
    assert layers(Grid(1), "core_attn", "layernorm") == (32 * (2 * stream + matrices) + logits,)
    assert layers(Grid(1), "mlp") == (32 * (3 * stream + matrices - 2 * tokens * 3 * 14336) + logits,)


@pytest.mark.parametrize(("length", "code"), [("8192", 0), ("131072", 1)])
def test_a_step_that_cannot_fit_does_not(cli, length, code):
    job = ("fit", "llama-8b", "--gpus", "16", "--gpu", "h100", "--tp", "8", "--zero", "1", "-s", length)
    assert cli(*job).exit_code == code
