"""Training of embeddings: several forwards and one backward, cached losses, and what is refused by name."""

import pytest

from memplan.errors import MemplanError
from memplan.library.answers.planned_job import plan_by_share


def plan(config="bf16-adamw", model="qwen3-0.6b", **settings):
    given = {"method.stage": "embedding", "sequence_length": 256, "micro_batch_size": 8, **settings}
    return plan_by_share(model, gpu="h100", config=config, stack="sentence-transformers", set=given)


def texts(config="bf16-adamw", **keys):
    return plan(config, **{f"method.embedding.{key}": value for key, value in keys.items()})


def requested(answer):
    return answer.memory.requested_bytes


def test_the_model_has_no_head_and_no_logits():
    untied = plan(model="qwen3-8b", config="lora", sequence_length=64, micro_batch_size=1)
    assert untied.components["weights"] < 2 * 7_568_405_504 + 2**27  # published without its head, and adapters
    assert not plan().components.get("logits", 0)


def test_each_column_stays_until_the_backward_of_all():
    """Two texts take twice what one takes, but for what is there once: weights, gradients and states."""
    two, more = (requested(plan(micro_batch_size=rows)) for rows in (8, 16))
    four = requested(texts(columns=4))
    assert two < more < four * 1.001  # one anchor, and three others that pass through the model together
    apart = requested(texts(columns=4, merges=False))
    assert abs(apart - four) < 0.25 * four


def test_gradients_wait_for_all_columns_beside_those_of_earlier_micro_steps():
    once, twice = (plan(sequence_length=8, micro_batch_size=1, gradient_accumulation_steps=steps) for steps in (1, 2))
    gradients = 2 * 596_049_920
    assert (
        requested(twice) - requested(once) > 0.7 * gradients
    )  # one text alone has a step that is nearly as full where they are joined


def test_a_cached_loss_has_one_mini_batch_at_a_time():
    small, large = (requested(texts_of(rows, mini_batch_size=4)) for rows in (8, 512))
    embeddings = 512 * 1024 * 4 * 30
    assert large - small < embeddings
    assert requested(texts_of(512)) > 8 * large
    assert requested(texts_of(8, mini_batch_size=4)) < requested(texts_of(8))


def texts_of(rows, **keys):
    given = {f"method.embedding.{key}": value for key, value in keys.items()}
    return plan(micro_batch_size=rows, **given)


def test_the_last_token_is_chosen_of_masked_rows():
    """``token_embeddings * mask`` with a mask of all numbers, which stays for backward (modules/pooling.py, 6.2.0)."""
    mean, last = (requested(texts("lora", pooling=name)) for name in ("mean", "last"))
    assert last > mean


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method.embedding.columns": 1}, "expected a whole number from 2"),
        ({"method.embedding.mini_batch_size": 0}, "expected a whole number from 1"),
        ({"method.embedding.mini_batch_size": 2, "method.embedding.loss": "pairs"}, "a cached loss compares anchors"),
        ({"evaluation": True}, "evaluation of embeddings is not modelled"),
        ({"parallel.data": 2}, "on several GPUs is not modelled"),
        ({"reentrant_checkpointing": True, "activation_checkpointing": "full"}, "reentrant checkpointing"),
        ({"method.stage": "sft", "method.embedding.columns": 3}, "sft compares no embeddings|is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(settings, said):
    with pytest.raises(MemplanError, match=said):
        plan(**settings)


def test_other_stacks_name_the_one_that_trains_embeddings():
    with pytest.raises(MemplanError, match="--stack sentence-transformers"):
        plan_by_share("qwen3-0.6b", gpu="h100", config="lora", set={"method.stage": "embedding"})


def test_other_encoders_are_refused_by_name():
    for name in ("microsoft/deberta-v3-base", "nomic-ai/nomic-embed-text-v1.5", "google/electra-base-discriminator"):
        with pytest.raises(MemplanError, match="encoder is not modelled"):
            plan(model=name)


def test_a_cached_loss_is_suggested_where_all_texts_do_not_fit_at_once():
    answer = plan_by_share(
        "qwen3-embedding-0.6b",
        gpu="rtx4090",
        config="lora",
        stack="sentence-transformers",
        set={"method.stage": "embedding", "micro_batch_size": 64, "sequence_length": 512},
    )
    changes = {item.change.partition("=")[0]: item for item in answer.suggestions}
    assert changes["method.embedding.mini_batch_size"].flips_verdict
    assert "embeds every text twice" in changes["method.embedding.mini_batch_size"].cost
    assert "compared with fewer texts" in changes["micro_batch_size"].cost
