"""``memplan fit`` where GPUs share sequences: torchtitan's context parallelism with flex attention."""

import pytest

import memplan
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share

JOB = {"gpu": "h100", "config": "mixed-adamw", "stack": "torchtitan"}
LAYERS, KEYS = 32, 8 * 128
"""Of Llama-3.1-8B."""


def plan(context: int, gpus: int, *more: str, model: str = "llama-8b", length: int = 32768):
    settings = [f"parallel.context={context}", *more]
    return plan_by_share(model, gpus=gpus, sequence_length=length, set=settings, **JOB).memory


def test_weights_and_states_are_divided_among_all_gpus():
    whole, shared = plan(1, 16), plan(4, 16)
    assert (shared.setup.config.parallel.data, shared.setup.config.parallel.shards) == (4, 16)
    assert shared.persistent_bytes == whole.persistent_bytes


def test_a_gpu_keeps_its_part_of_the_rows_and_all_keys_and_values():
    ranks, own, length = 4, 8192, 32768
    shared, alone = (
        dict(plan(n, 16, "activation_checkpointing=none", length=tokens).instants)["loss backward"]
        for n, tokens in ((ranks, length), (1, own))
    )
    others = length - own
    keys = LAYERS * 2 * KEYS * 2 * others
    tables = LAYERS * 128 * 4 * others  # cosines and sines of 64 pairs, in fp32
    rows = 3 * 8 * length  # ids, labels and positions of whole sequences, beside a GPU's part of them
    blocks = own // 128
    mask = 4 * (2 * blocks + 2 * ranks * blocks + 4 * ranks * blocks**2) - 16 * blocks * (blocks + 1)
    assert shared - alone == keys + tables + rows + mask


def test_one_gpu_for_a_sequence_changes_nothing():
    alone = plan_by_share("llama-8b", gpus=16, sequence_length=32768, **JOB).memory
    assert plan(1, 16).instants == alone.instants
    assert plan(1, 16).device_bytes == alone.device_bytes


def test_longer_sequences_fit_the_more_gpus_share_them():
    fits = [plan(n, 16, length=131072).verdict for n in (1, 8)]
    assert fits == ["no", "fits"]


@pytest.mark.parametrize(
    ("context", "gpus", "length", "words"),
    [
        (8, 16, 1000, "8 GPUs do not share a sequence of 1,000 tokens evenly, in blocks of 128; 1,024 they do"),
        (8, 12, 2048, "12 GPUs are no multiple of tensor x pipeline x context = 8; the nearest that is: 8"),
    ],
)
def test_degrees_that_do_not_divide_are_one_line_with_what_does(context, gpus, length, words):
    with pytest.raises(InvalidFileError, match=words):
        plan(context, gpus, length=length)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("kernels.attention=flash",), "flash over a sequence that GPUs share is torch's ring"),
        (("parallel.pipeline=2",), "it is not modelled where GPUs share sequences"),
        (("evaluation=true",), "it is not modelled where GPUs share sequences"),
        (("compile=layers",), "it is not modelled where GPUs share sequences"),
        (("parallel.zero_stage=0",), "not how torchtitan shares sequences"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(more, words):
    with pytest.raises(CannotAnswerError, match=words):
        plan(2, 16, *more)


def test_matrices_and_experts_are_shared_beside_them():
    both = plan(2, 16, "parallel.tensor=4", "parallel.sequence=true")
    assert both.setup.config.parallel.shards == 4
    mixture = plan(2, 64, "parallel.expert=8", model="qwen3-30b-a3b")
    assert (mixture.setup.config.parallel.shards, mixture.setup.config.parallel.expert_shards) == (64, 8)


def test_a_file_of_torchtitan_says_it(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(
        '[model]\nname = "qwen3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 32768\n'
        "[parallelism]\ncontext_parallel_degree = 4\n"
    )
    memory = plan_by_share(str(path), gpu="h100", gpus=16).memory
    assert memory.setup.config.parallel.context == 4
    path.write_text(path.read_text() + 'context_parallel_load_balancer = "ptrr"\n')
    with pytest.raises(CannotAnswerError, match="divided as their masks have it"):
        plan_by_share(str(path), gpu="h100", gpus=16)


def test_suggest_says_that_it_does_not_search_them():
    with pytest.raises(CannotAnswerError, match="suggest does not search shared sequences yet; memplan fit plans them"):
        memplan.suggest_layouts("llama-8b", gpu="h100", gpus=16, stack="torchtitan", set=["parallel.context=2"])
