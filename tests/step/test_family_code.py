"""How a family's code runs is described for each family, or refused by name."""

from __future__ import annotations

import pytest

from memplan.errors import CannotAnswerError
from memplan.model.families import families
from memplan.step.kernels.family_code import OWN, family_code


@pytest.mark.parametrize("family", families())
def test_every_family_is_described_as_transformers_runs_it(family: str) -> None:
    assert family_code("transformers", family).forms_tables


@pytest.mark.parametrize("code", ["transformers", "torchtune", "torchtitan"])
def test_a_family_that_is_not_described_is_refused_by_name(code: str) -> None:
    with pytest.raises(CannotAnswerError, match=f"^{code}'s code of family gpt is not described; that of .*llama"):
        family_code(code, "gpt")  # type: ignore[arg-type]


def test_the_bundled_models_take_any_family() -> None:
    assert family_code("own", "gpt") is OWN
