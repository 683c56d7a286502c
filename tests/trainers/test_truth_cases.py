"""Files of every trainer against what they say, read by hand: fields of the answer of ``memplan import``.

Of the rest of each answer there is a digest, which ``pytest tests/trainers --update-golden`` rewrites.
"""

import json
import shlex
from pathlib import Path

import pytest

import memplan
from memplan.documents.escaping import json_text
from tests.golden.test_golden import settled
from tests.golden.test_recorded_jobs import digest
from tests.jobs import yaml_data

CASES = yaml_data(Path(__file__).parent / "truth_cases.yaml")
DIGESTS = Path(__file__).with_name("truth_digests.json")
TOP = ("trainer", "role", "kind", "model", "method", "packing", "keys")
"""Parts of an answer; other fields are those of its training config."""


def imported(case, folder, monkeypatch):
    monkeypatch.chdir(folder)
    beside = case.get("beside", {})
    for name, text in beside.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    given = shlex.split(case["argv"]) if "argv" in case else folder / f"job{case.get('suffix', '.yaml')}"
    if "file" in case:
        given.write_text(case["file"])
    return memplan.import_file(given, gpus=case.get("gpus"), trainer_version=case.get("version")).to_dict()


def field(answer, path):
    value = answer if path.partition(".")[0] in TOP else answer["training"]
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_read_as_its_trainer_would(name, tmp_path, monkeypatch, request):
    case = CASES[name]
    answer = imported(case, tmp_path, monkeypatch)
    known, whole = (
        json.loads(DIGESTS.read_text(encoding="utf-8")),
        settled(json.dumps(answer)).replace(str(tmp_path), ""),
    )
    if request.config.getoption("--update-golden"):
        known = {one: known.get(one) for one in CASES} | {name: digest(whole)}
        DIGESTS.write_text(json_text(known, indent=0), encoding="utf-8")
    truth = case.get("truth", {})
    assert {path: field(answer, path) for path in truth} == truth
    refused = {one["key"] for one in answer["keys"]["not_modelled"]}
    assert set(case.get("refused", ())) == refused if "refused" in case else not refused
    assert [one["key"] for one in answer["keys"]["unknown"]] == case.get("unknown", [])
    assert bool(answer["needs"]) == ("needs" in case or answer["role"] == "launcher")
    assert case.get("needs", "") in "".join(answer["needs"])
    assert digest(whole) == known.get(name)
