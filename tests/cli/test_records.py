"""``memplan lab show``: what is shipped, one record in full, and what cannot be shown."""

import json

import pytest

from memplan.catalog.catalog import data_directory

FOLDER = data_directory() / "configs" / "evidence"


WITHOUT_A_NAME = [
    {**row, **{key: 1 for key, value in row.items() if isinstance(value, str)}}
    for row in json.loads((FOLDER / "lab-weight-bits.json").read_text())["rows"]
]


def test_without_a_name_every_record_is_listed(cli):
    ran = cli("lab", "show")
    names = [path.stem.removeprefix("train-") for path in FOLDER.glob("train-*.json")]
    names += [path.stem.removeprefix("lab-") for path in FOLDER.glob("lab-*.json")]
    assert ran.exit_code == 0
    assert all(f"\n{name} " in ran.out for name in names)


def test_the_list_has_a_row_for_each_record_in_json(cli):
    rows = cli("lab", "show", "--json").data["rows"]
    assert {row["name"] for row in rows} == {
        path.stem for kind in ("train", "lab") for path in FOLDER.glob(f"{kind}-*.json")
    }


@pytest.mark.parametrize("name", ["tier1", "train-tier1", str(FOLDER / "train-tier1.json")])
def test_a_record_of_training_is_shown_with_its_bytes(cli, name):
    ran = cli("lab", "show", name)
    assert "behind: validation loss" in ran.out
    assert "optimizer_states" in ran.out


def test_a_mistyped_name_gets_the_nearest(refused):
    assert "did you mean 'tier1'" in refused("lab", "show", "teir1")


def test_a_record_of_training_has_no_picture(refused, tmp_path):
    assert "no picture" in refused("lab", "show", "tier1", "--plot", tmp_path / "x.svg")


def test_a_picture_needs_one_record(refused):
    assert "name it" in refused("lab", "show", "--plot", "x.svg")


@pytest.mark.parametrize(
    ("content", "why"),
    [("{", "not valid JSON"), ("[]", "not a record"), ('{"schema": "memplan/plan/1"}', "not a record")],
)
def test_a_file_that_is_no_record_is_refused(refused, write, content, why):
    assert why in refused("lab", "show", write("record.json", content))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("train-tier1", "runs", [{"seed": 1}]),
        ("train-tier1", "validation_loss", {"mean": "low"}),
        ("lab-orthogonality", "rows", 3),
        ("lab-orthogonality", "experiment", "../x"),
        ("lab-precision", "seeds", None),
        ("lab-weight-bits", "rows", WITHOUT_A_NAME),
    ],
)
def test_a_record_whose_figures_are_others_than_memplan_writes_is_refused(refused, write, name, key, value):
    record = json.loads((FOLDER / f"{name}.json").read_text()) | {key: value}
    assert refused("lab", "show", write("record.json", json.dumps(record)))
