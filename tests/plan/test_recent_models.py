"""Models that are recommended are of the last year of the catalog, and what fits is what the plan says."""

from __future__ import annotations

from memplan.plan.suggested.recent import recent_models


def test_a_model_is_recent_to_the_month():
    released = {"new": "2025-08-05", "edge": "2024-08", "before": "2024-07-31", "mine": None}
    assert recent_models(released) == (["new", "edge", "mine"], "2024-08")
    assert recent_models({"mine": None}) == (["mine"], "")


def test_every_shipped_model_has_a_date(catalog):
    assert [name for name, entry in catalog.models.entries.items() if not entry.released] == []


def test_a_gpu_is_recommended_recent_models_for_adapters_and_for_all_weights(cli, catalog):
    data = cli("recommend", "--gpu", "rtx4090", "--json").data
    (row,) = data["rows"]
    choices = [*row["adapters"], row["established"], row["experimental"]]
    assert [choice["config"] for choice in row["adapters"]] == ["qlora", "lora"]
    for choice in choices:
        assert choice["released"] == catalog.models[choice["model"]].released >= row["released_since"]
    assert row["adapters"][0]["parameters"] > row["adapters"][1]["parameters"] > row["established"]["parameters"]
