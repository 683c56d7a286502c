"""How a family's code runs is described for each family, or refused by name."""

from dataclasses import replace

import pytest

from memplan.catalog.training_config import Adapter, TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.library.lookup.model_lookup import catalog_model
from memplan.model.families import families
from memplan.step.kernels.card_support import on_card
from memplan.step.kernels.family_code import OWN, family_code
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog


@pytest.mark.parametrize("family", families())
def test_every_family_is_described_as_transformers_runs_it(family: str) -> None:
    rotates_or_counts = family not in (
        "bert",
        "distilbert",
        "mpnet",
        "roberta",
        "xlm_roberta",
    )  # whose positions are buffers
    assert family_code(shipped_catalog().stack("transformers"), family).forms_tables is rotates_or_counts


@pytest.mark.parametrize("code", ["transformers", "torchtune", "torchtitan"])
def test_a_family_that_is_not_described_is_refused_by_name(code: str) -> None:
    with pytest.raises(CannotAnswerError, match=f"^{code}'s code of family gpt is not described; that of .*llama"):
        family_code(shipped_catalog().stack(code), "gpt")


def test_the_bundled_models_take_any_family() -> None:
    assert family_code(shipped_catalog().stack("bundled"), "gpt") is OWN


def test_torchs_attention_was_given_copies_and_before_that_repeated_keys():
    codes = {at: family_code(shipped_catalog().stack(f"transformers@{at}"), "llama") for at in ("4.53", "4.55", "4.56")}
    assert [code.contiguous_heads for code in codes.values()] == [True, True, False]
    assert [code.repeats_keys for code in codes.values()] == [True, False, False]
    assert [code.asks_for_groups for code in codes.values()] == [False, True, True]


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("bloom-560m", "ALiBi"),
        ("gemma-4-31b", "normalised values"),
        ("mistral-small-4-119b", "latent attention whose queries are scaled by their position"),
    ],
)
def test_what_models_of_transformers_alone_have_is_refused_elsewhere(model, what, refused):
    line = refused("fit", model, "--stack", "bundled", "--gpu", "b200", code=3)
    assert f"has {what}" in line
    assert "--stack trl" in line


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [("8.0", ("flash", "efficient")), ("9.0", ("flash", "efficient")), ("7.5", ("math", "math"))],
)
def test_heads_wider_than_flash_takes_have_a_kernel_of_their_own(capability, kernels):
    catalog = shipped_catalog()
    model = catalog_model("gemma-4-31b", catalog)
    setup = resolve(TrainingConfig("test", stack="trl", adapter=Adapter(rank=8)), catalog, "test")
    card = replace(catalog.gpus["a100-sxm-80gb"], compute_capability=capability)
    chosen = on_card(setup, model, card)
    assert (chosen.profile.attention, chosen.wide_attention) == kernels
    assert on_card(setup, catalog_model("gemma-3-27b", catalog), card).wide_attention is None
