"""Muon over torch's shards: jobs drawn at random, formula against trace at every instant, to the byte."""

from random import Random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.muon import Muon
from memplan.muon.parameter_updates import bytes_of_round, round_size
from memplan.step.states import muon_batches
from memplan.step.states.muon_batches import MuonBatch, is_exchanged, round_phases
from tests.survey.drawn_jobs import Job, verdict

MOMENTA = ("muon-fp32", "muon-bf16", "muon-int8", "muon-int4", "muon-gauss4", "muon-gauss2", "muon-ternary")
ODD = {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 896}


def drawn(seed: int | str) -> Job:
    rng = Random(f"muon over shards {seed}")
    blocks = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1536}
    plain = rng.random() < 0.4
    shape = rng.choice([ODD, blocks]) if plain else blocks
    training = {
        "description": "drawn at random",
        "activation_checkpointing": rng.choice(["none", "full"]),
        "compute_dtype": "bf16",
        "micro_batch_size": 1,
        "sequence_length": rng.choice([1, 16, 33]),
        "gradient_accumulation_steps": rng.choice([1, 2]),
        "clip_gradients": rng.random() < 0.3,
        "weights": {"default": rng.choice(["fp32", "bf16"])},
        "optimizer": {"hidden_matrix": rng.choice(MOMENTA[:2] if plain else MOMENTA)},
        "kernels": {"newton_schulz": rng.choice(["min", "fast"]), "muon_batch_bytes": rng.choice([0, 0, 2**23, 2**26])},
        "parallel": {"data": rng.choice([2, 3, 4, 8, 16]), "zero_stage": 3},
    }
    keys = {"model_type": "llama", "num_hidden_layers": rng.choice([1, 2, 5]), "vocab_size": rng.choice([999, 3000])}
    training["optimizer"]["default"] = rng.choice(["adamw-fp32", "adamw-int8"])
    return Job({**keys, **shape, "max_position_embeddings": 2048, "tie_word_embeddings": rng.random() < 0.5}, training)


@pytest.mark.thorough
@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(24))
def test_the_formula_equals_the_trace_at_the_peak_and_in_the_optimizer_step(seed, catalog):
    result = verdict(drawn(seed), catalog)
    assert result.outcome in ("agrees", "differs"), result.reason  # other instants are those of any optimizer
    assert result.formula_bytes == result.traced_bytes
    assert not result.differences.keys() & {"optimizer step", "persistent", "host"}


@pytest.mark.parametrize(("model", "role"), [("qwen2.5-0.5b", "hidden_matrix"), ("qwen1.5-moe-a2.7b", "expert_matrix")])
def test_shards_that_the_library_refuses_are_refused(model, role):
    with pytest.raises(CannotAnswerError, match="no whole blocks of 256"):
        plan_by_share(model, gpu="h100", config="muon", gpus=4, set={f"optimizer.{role}": "muon-ternary"})


@pytest.mark.parametrize("seed", range(4))
def test_stacks_of_experts_are_refused_where_the_library_refuses_them(seed, catalog, monkeypatch):
    job = drawn(f"experts {seed}")
    name = Random(seed).choice(MOMENTA[2:])
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
    model = {**job.model, **experts, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    job = Job(model, {**job.training, "optimizer": {"expert_matrix": name, "default": "adamw-fp32"}})
    refused = verdict(job, catalog)
    assert refused.outcome == "refused"
    assert "mlp.experts.down_proj: rows of 160 elements are no whole blocks of" in refused.reason
    monkeypatch.setattr(muon_batches, "_refuse_broken_rows", lambda entry: None)
    assert "OptimizerError" in verdict(job, catalog).reason


def test_a_round_has_pieces_of_all_its_matrices_and_some_of_them_whole():
    plan = plan_by_share("llama-3.2-1b", gpu="h100", config="muon", gpus=4).memory
    entry = next(entry for entry in plan.states.tensors if entry.tensor.name.endswith("q_proj.weight"))
    for together, owned in ((3, 1), (4, 1), (5, 2), (8, 2)):
        phases = round_phases(plan.setup, entry, MuonBatch(together, some_alone=False, ranks=4))
        pieces, whole = 2 * together * 2048 * 2048 // 4, 2 * owned * 2048 * 2048
        assert phases.momentum[0] == phases.weights[0] == pieces
        assert sum(phases.norms) == whole + (pieces if owned == 1 else max(pieces, whole))
        assert (phases.update, phases.workspace[0]) == (0, whole)


@pytest.mark.parametrize(("tensor", "gpus"), [(2, 2), (8, 8), (4, 12), (8, 40)])
def test_rounds_of_matrices_that_ranks_share_take_what_the_library_foretells(tensor, gpus):
    """Parts of matrices by columns or rows, and shards of these, as DTensors on a fake process group."""
    settings = [f"parallel.tensor={tensor}", f"kernels.muon_batch_bytes={2**27 if gpus == 12 else 0}"]
    plan = plan_by_share("llama-8b", gpu="h100", gpus=gpus, config="muon", stack="torchtitan", set=settings).memory
    torch.distributed.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (gpus // tensor, tensor), mesh_dim_names=("fsdp", "tp"))
        entries = [entry for entry in plan.states.tensors if is_exchanged(entry)]
        assert len(entries) == 5
        for entry in entries:
            batches = muon_batches.muon_batches(plan.setup, [(entry, entry.tensor.count)])
            (batch,) = batches.values()
            handles, group = _as_parts(entry.tensor, batch.together, mesh, plan.setup.profile)
            assert batch.together == min(entry.tensor.count, round_size(handles[0], group))
            assert bytes_of_round(handles, group) == round_phases(plan.setup, entry, batch).bytes
    finally:
        torch.distributed.destroy_process_group()


def _as_parts(tensor, count, mesh, profile):
    """Return the library's handles of so many parts like one, and their group."""
    by_columns = tensor.shape[1] != tensor.divided[1]
    placements = (Shard(0), Shard(1)) if by_columns else (_StridedShard(0, split_factor=mesh.size(1)), Shard(0))
    local, strides = torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta"), (tensor.divided[1], 1)
    options = {"run_check": False, "shape": torch.Size(tensor.divided), "stride": strides}
    parts = [torch.nn.Parameter(DTensor.from_local(local, mesh, placements, **options)) for _ in range(count)]
    optimizer = Muon(parts, ns_workspace=profile.newton_schulz, batch_bytes=profile.muon_batch_bytes)
    return [handle for handle, _ in optimizer.handles()], optimizer.param_groups[0]
