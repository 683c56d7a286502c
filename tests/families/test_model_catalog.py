"""Every model that ships has the parameters that its file says, and a name of its own."""

import re
from pathlib import Path

import pytest

from memplan.errors import normalised_name
from memplan.model.families import families, read_config
from memplan.model.inventory import active_parameter_count, parameter_count
from memplan.model.parameter_tensors import inventory_of
from tests.jobs import yaml_data

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "models"
FILES = sorted(FOLDER.glob("*.yaml"))
ENTRIES = {path.stem: yaml_data(path) for path in FILES}
KEYS = {
    "title",
    "architecture",
    "hf_id",
    "aliases",
    "ids",
    "mirrors",
    "tuned",
    "released",
    "released_weights",
    "expected_parameters",
    "expected_active_parameters",
    "published",
    "config",
    "sources",
}


def spec_and_notes(name):
    entry = ENTRIES[name]
    return read_config({"model_type": entry["architecture"]} | entry["config"], entry["title"], name)


def test_counts_equal_what_the_shapes_give():
    for name in ENTRIES:
        entry = ENTRIES[name]
        inventory = inventory_of(spec_and_notes(name)[0])
        total, active = parameter_count(inventory), active_parameter_count(inventory)
        assert entry["expected_parameters"] == total, name
        unused = parameter_count(tensor for tensor in inventory if not tensor.used)
        assert entry.get("expected_active_parameters", total - unused) == active, name


def test_entry_is_complete():
    for name in ENTRIES:
        entry = ENTRIES[name]
        assert set(entry) <= KEYS, name
        assert {"title", "architecture", "hf_id", "expected_parameters", "config", "sources"} <= set(entry), name
        assert entry["sources"], name
        assert all(set(source) == {"url", "checked"} for source in entry["sources"]), name
        assert entry["architecture"] in families(), name


def test_config_has_only_keys_that_the_family_reads():
    for name in ENTRIES:
        entry = ENTRIES[name]
        notes = spec_and_notes(name)[1]
        assert not [note for note in notes if note.startswith("ignored")], name
        assert "model_type" not in entry["config"], name


def test_published_counts_agree_or_say_why_not():
    for name, entry in ENTRIES.items():
        if (published := entry.get("published")) is None:
            continue
        expected = entry["expected_parameters"]
        assert set(published) == {"parameters", "exact", "note"}, name
        assert published["note"], name
        if not published["exact"]:
            assert abs(published["parameters"] - expected) <= expected * 2 // 100, name
        elif published["parameters"] != expected:
            reasons = ("second copy", "packed", "vision tower", "prediction module", "no parameters")
            assert any(word in published["note"] for word in reasons), name


def test_names_and_aliases_are_unique_without_case_and_separators():
    names = [normalised_name(name) for key, entry in ENTRIES.items() for name in (key, *entry.get("aliases", []))]
    assert len(names) == len(set(names))


def test_no_model_stands_twice():
    lists = ("ids", "mirrors", "tuned")
    ids = [
        name.lower() for e in ENTRIES.values() for name in (e["hf_id"], *(i for key in lists for i in e.get(key, ())))
    ]
    assert sorted(ids) == sorted(set(ids))
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in ids)


def test_a_release_is_a_month():
    released = {name: entry["released"] for name, entry in ENTRIES.items() if "released" in entry}
    assert {name: month for name, month in released.items() if not re.fullmatch(r"20[12]\d-[01]\d", month)} == {}


def test_there_are_at_least_150_models():
    assert len(ENTRIES) >= 150


def test_every_family_has_a_released_model():
    texts = {entry["config"].get("text_config", {}).get("model_type") for entry in ENTRIES.values()}
    behind_towers_alone = {"mistral4"}
    assert {entry["architecture"] for entry in ENTRIES.values()} | texts - {None} == set(
        families()
    ) | behind_towers_alone


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("llama-8b", "llama-3.1-8b"),
        ("llama-70b", "llama-3.1-70b"),
        ("llama-405b", "llama-3.1-405b"),
        ("llama-1b", "llama-3.2-1b"),
        ("llama-3b", "llama-3.2-3b"),
        ("mistral-7b", "mistral-7b-v0.1"),
        ("mixtral-8x7b", "mixtral-8x7b-v0.1"),
        ("mixtral-8x22b", "mixtral-8x22b-v0.1"),
    ],
)
def test_short_name_means_the_model_that_people_mean(alias, name):
    assert alias in ENTRIES[name]["aliases"]
