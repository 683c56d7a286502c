"""How a family's code runs is described for each family, or refused by name."""

from __future__ import annotations

import pytest

from memplan.errors import CannotAnswerError
from memplan.model.families import families
from memplan.step.kernels.family_code import OWN, family_code
from tests.jobs import shipped_catalog


@pytest.mark.parametrize("family", families())
def test_every_family_is_described_as_transformers_runs_it(family: str) -> None:
    assert family_code(shipped_catalog().stack("transformers"), family).forms_tables


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
