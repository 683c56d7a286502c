"""Families whose own code in a library saves more than its stack says: strict data, named in the answers they are about."""

import pytest

from memplan.catalog.catalog import data_directory
from memplan.catalog.shipped_tables import TABLES, FamilyGap, StackGaps
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import load_document
from memplan.documents.schemas import validate
from memplan.library.lookup import catalog_model
from memplan.model.families import families
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
DOCUMENT = load_document(data_directory() / TABLES["gaps"])


@pytest.mark.parametrize("stack", DOCUMENT.data)
def test_the_file_keeps_to_its_schema_and_names_what_there_is(stack):
    gaps = validate(StackGaps, DOCUMENT, DOCUMENT.data[stack], (stack,))
    assert gaps == CATALOG.tables.family_gaps[stack]
    assert stack in CATALOG.stacks
    assert set(gaps.families) <= set(families())
    assert list(gaps.families) == sorted(gaps.families)
    assert all(0 <= gap.least_percent <= gap.most_percent for gap in gaps.families.values())


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        (FamilyGap(0, 4), "traced: up to 4 % more than planned"),
        (FamilyGap(1, 1, "a mask is saved"), "a mask is saved (traced: 1 % more than planned)"),
        (FamilyGap(15, 18, "its GELU"), "its GELU (traced: 15 to 18 % more than planned)"),
    ],
)
def test_a_gap_in_words(gap, text):
    assert gap.text == text


@pytest.mark.parametrize(("stack", "first"), [("transformers", "phi3 in transformers: "), ("bundled", "memory of ")])
def test_a_plan_names_the_gap_first_under_the_stack_that_has_it(stack, first):
    config = TrainingConfig(
        description="a stack", stack=stack, weights={"default": "fp32"}, compute_dtype="fp32", sequence_length=1024
    )
    setup = resolve(config, CATALOG, stack)
    plan = CompiledPlan(catalog_model("phi-3-mini", CATALOG), setup).evaluate(
        Device(CATALOG.gpus["rtx4090"], "rtx4090")
    )
    assert plan.not_modelled[0].startswith(first)
