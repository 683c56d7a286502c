"""Answers that rest on many plans (largest, fewest, suggested, what to change) or on none of a training step, each as a digest.

The commands are those of ``commands.txt`` that name a GPU and ask for JSON. ``pytest -m thorough tests/golden
--update-golden`` rewrites the digests.
"""

import json
import shlex
from hashlib import sha256
from pathlib import Path

import pytest

from memplan.documents.escaping import json_text
from tests.golden.test_golden import settled

pytestmark = pytest.mark.thorough

FILE = Path(__file__).with_name("answers.json")
ASKED = (
    "max ", "where ", "suggest ", "recommend ", "fit --rank ", "fit --method inference ",
    "fit llama-8b --gpu rtx4090 --config ",
)  # fmt: skip
COMMANDS = [
    line
    for line in Path(__file__).with_name("commands.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith(ASKED) and "--json" in line and "--gpu" in line and "{out}" not in line
]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_answers_what_it_answered(cli, request, line):
    ran = cli(*shlex.split(line))
    found = f"{ran.exit_code} {sha256((settled(ran.out) + ran.err).encode()).hexdigest()[:12]}"
    answers = json.loads(FILE.read_text(encoding="utf-8"))
    if request.config.getoption("--update-golden"):
        answers = {one: answers.get(one) for one in COMMANDS} | {line: found}
        FILE.write_text(json_text(answers, indent=0), encoding="utf-8")
    assert found == answers.get(line)
