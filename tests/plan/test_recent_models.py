"""Models that are recommended are of the last year and a half of the catalog, and what fits is what the plan says."""

import re

from memplan.plan.suggested.recent_models import recent_models


def test_a_model_is_recent_to_the_month():
    released = {"new": "2026-02-05", "edge": "2024-08", "before": "2024-07-31", "mine": None}
    assert recent_models(released) == (["new", "edge", "mine"], "2024-08")
    assert recent_models({"mine": None}) == (["mine"], "")


def test_a_shipped_model_without_a_month_is_not_weighed(catalog):
    months = catalog.release_months()
    assert catalog.models.entries["yi-9b"].released is None
    assert "yi-9b" not in months
    assert all(re.fullmatch(r"\d{4}-\d\d(-\d\d)?", month) for month in months.values())


def test_a_gpu_is_recommended_recent_models_for_adapters_and_for_all_weights(cli, catalog):
    data = cli("recommend", "--gpu", "rtx4090", "--json").data
    (row,) = data["rows"]
    choices = [*row["adapters"], row["established"], row["experimental"]]
    assert [choice["config"] for choice in row["adapters"]] == ["qlora", "lora"]
    for choice in choices:
        assert choice["released"] == catalog.models[choice["model"]].released >= row["released_since"]
    assert row["adapters"][0]["parameters"] > row["adapters"][1]["parameters"] > row["established"]["parameters"]
