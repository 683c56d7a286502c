"""Muon over ranks: whole matrices in one process judge it, to the bit."""

import pytest
import torch

from memplan.muon import Muon, OptimizerError
from memplan.muon.sharded.divisions import chunk_lengths
from tests.muon.sharded_ranks import (
    divided_models_step_to_the_bit,
    divided_states,
    in_ranks,
    ranks_refuse_together,
    replicas_train_alike,
    shared_steps_agree_to_the_bit,
    steps_agree_to_the_bit,
    trained,
)

WORLDS = [2, pytest.param(4, marks=pytest.mark.thorough), pytest.param(8, marks=pytest.mark.slow)]
OPTIONS = {
    "fp32": {},
    "int8": {"momentum_format": "int8", "adamw_format": "bf16", "batch_bytes": 1 << 16},
    "gauss4": {"momentum_format": "gauss4", "ns_workspace": "min", "chunk_elements": 64},
    "ternary": {"momentum_format": "ternary", "scale_dtype": "bf16"},
    "split": {"master": "split", "momentum_format": "bf16"},
    "in host memory": {"momentum_format": "bf16", "offload": True},
}
FEW = {name: OPTIONS[name] for name in ("fp32", "int8", "split", "in host memory")}
"""Those of two ranks; more ranks have them all."""


@pytest.mark.parametrize("world", WORLDS)
def test_steps_of_divided_matrices_equal_those_of_whole_ones_and_take_what_was_foretold(world, tmp_path):
    in_ranks(world, steps_agree_to_the_bit, tmp_path, FEW if world == 2 else OPTIONS)


@pytest.mark.parametrize("world", WORLDS)
def test_shared_steps_of_replicas_equal_those_of_one_rank_and_take_what_was_foretold(world, tmp_path):
    in_ranks(world, shared_steps_agree_to_the_bit, tmp_path, FEW if world == 2 else OPTIONS)
    in_ranks(world, replicas_train_alike, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low_rank": 2}, "low_rank with share_replicas"),
        ({"gradient_format": "bf16"}, "gradient_format with share_replicas"),
        ({"share_replicas": 2}, "expected True or False"),
    ],
)
def test_what_replicas_cannot_share_is_refused_in_words(options, message):
    with pytest.raises(OptimizerError, match=message):
        Muon([torch.nn.Parameter(torch.zeros(8, 8))], **{"share_replicas": True, **options})


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.thorough)])
def test_a_checkpoint_is_loaded_by_the_same_and_by_other_numbers_of_ranks(saved, loaded, tmp_path):
    folder = str(tmp_path / "checkpoint")
    in_ranks(saved, trained, tmp_path, folder, True)
    (tmp_path / f"meeting-trained-{loaded}").unlink(missing_ok=True)
    in_ranks(loaded, trained, tmp_path, folder, False)


@pytest.mark.parametrize("world", WORLDS[:2])
def test_matrices_of_tensor_parallel_models_are_orthogonalised_whole_to_the_bit(world, tmp_path):
    in_ranks(world, divided_models_step_to_the_bit, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (4, 2)])
def test_states_of_tensor_parallel_models_are_loaded_by_the_same_and_by_other_numbers_of_ranks(saved, loaded, tmp_path):
    folder = str(tmp_path / "checkpoint")
    in_ranks(saved, divided_states, tmp_path, folder, True)
    (tmp_path / f"meeting-divided_states-{loaded}").unlink(missing_ok=True)
    in_ranks(loaded, divided_states, tmp_path, folder, False)


@pytest.mark.parametrize("world", WORLDS[:2])
def test_ranks_refuse_together_and_clip_by_one_norm(world, tmp_path):
    in_ranks(world, ranks_refuse_together, tmp_path)


@pytest.mark.parametrize(("length", "ranks"), [(1, 1), (7, 3), (3, 8), (8, 8), (9, 8), (4096, 7)])
def test_pieces_are_those_of_chunk(length, ranks):
    pieces = [len(piece) for piece in torch.arange(length).chunk(ranks)]
    assert chunk_lengths(length, ranks) == (*pieces, *([0] * (ranks - len(pieces))))
