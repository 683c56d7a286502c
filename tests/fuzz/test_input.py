"""Whatever memplan is given, it answers or refuses: in a readable line, at once, in little memory.

Valid files of every kind are damaged (values, keys, text, bytes); settings and command lines are drawn at random.
The default run takes some hundred cases, the same each time; as many as are wanted, such as 200,000, are run by::

    MEMPLAN_FUZZ_CASES=200000 pytest -m slow tests/fuzz/test_input.py

and others by ``MEMPLAN_FUZZ_SEED``, the number of the first case; a failure names its own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.library.trainers.imported_file import import_file

from .any_settings import plan_with_settings
from .arguments import command_line
from .hostile import damaged, damages, edited, edits, serialised
from .library_calls import library_call
from .running import called, check, outcome, peak_bytes
from .seeds import CONFIG, GPU, TRAINERS, Seed, safetensors, seeds
from .surroundings import answered, bomb, cleared, put_instead, request, variables, with_trainer_keys

FILE_CASES, LINE_CASES, SETTING_CASES, OTHER_CASES = 250, 100, 200, 30
LONG_RUN = int(os.environ.get("MEMPLAN_FUZZ_CASES", "20000"))
SEED = int(os.environ.get("MEMPLAN_FUZZ_SEED", "0"))
WORDS_OF_A_COMMAND = "command.sh"
"""The seed that no command reads: its words are the command."""
COMMAND_EVERY = 8
"""Damaged files that go to their reader, which is fast, to one that a whole command is run on."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with every seed written into a folder of its own."""
    place = tmp_path_factory.mktemp("fuzz")
    return [(seed, seed.written(place / str(index))) for index, seed in enumerate(seeds(place))]


def damage_a_file(random: Random, workplace, peak: int) -> None:
    """Damage a file of any kind, and read it."""
    seed, path = random.choice(workplace)
    if seed.data is not None and random.randrange(4):
        content = serialised(edited(seed.data, edits(random)))
        content = safetensors(content) if path.suffix == ".safetensors" else content
    else:
        content = damaged(seed.content, damages(random))
    path.write_bytes(content)
    _read(random, seed, path, content, peak)


def _read(random: Random, seed: Seed, path: Path, content: bytes, peak: int) -> None:
    """Read what lies at a seed's path as its reader does, or have a command of its own read it."""
    if random.randrange(COMMAND_EVERY):
        check(called(lambda: seed.read(path), str(path)), peak)
    else:
        check(outcome(seed.arguments(random.choice(seed.commands), path), content), peak)


def read_a_bomb(random: Random, workplace, peak: int) -> None:
    """Read a whole file that is made to hurt, or what is no file, where one of any kind is expected, or one beside it."""
    seed, path = random.choice([pair for pair in workplace if pair[0].file != WORDS_OF_A_COMMAND])
    place = path.parent / random.choice((seed.file, *seed.beside))
    try:
        if random.randrange(3):
            place.write_bytes(bomb(random))
        else:
            put_instead(random, place)
        _read(random, seed, path, b"", peak)
    finally:
        cleared(place)
        seed.written(path.parent)


def set_trainer_keys(random: Random, workplace, peak: int) -> None:
    """Set keys that trainers' mappings read, in a trainer's file, to anything."""
    trainers = [(seed, path) for seed, path in workplace if seed.read is import_file and seed.data is not None]
    seed, path = random.choice(trainers)
    content = serialised(with_trainer_keys(random, seed.data))
    path.write_bytes(content)
    _read(random, seed, path, content, peak)


def run_a_command_line(random: Random, peak: int) -> None:
    """Run a command line drawn at random, in an environment drawn at random."""
    check(outcome(*command_line(random), variables(random)), peak)


def ask_the_page(random: Random, peak: int) -> None:
    """Send the page's server a request."""
    pytest.importorskip("starlette")
    scope = request(random)
    got: list[tuple[int, bytes]] = []
    check(called(lambda: got.append(answered(scope)), str(scope)), peak)
    for status, body in got:
        assert status in (200, 307, 403, 404, 405, 414, 421, 422), (scope, status, body[:400])
        assert b"Traceback" not in body, scope


def call_the_library(random: Random, peak: int) -> None:
    """Call a function of the library with arguments of any kind."""
    text, call = library_call(random)
    check(called(call, text), peak)


def change_settings(random: Random, peak: int) -> None:
    """Plan a job with settings drawn at random."""
    text, planned = plan_with_settings(random)
    check(called(planned, text), peak)


def searched(cases: int, case: Callable[..., None], *given_too: object) -> None:
    """Run so many cases, in all of which hypothesis makes the choices, so that a failure is made small."""
    chosen = settings(
        max_examples=cases, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    peak = peak_bytes()
    chosen(given(st.randoms(use_true_random=False))(lambda random: case(random, *given_too, peak)))()


def repeated(cases: int, case: Callable[..., None], *given_too: object) -> None:
    """Run so many cases from numbered seeds, without hypothesis' bookkeeping, which takes most of the time."""
    peak = peak_bytes()
    for number in range(SEED, SEED + cases):
        try:
            case(Random(number), *given_too, peak)
        except AssertionError as error:
            raise AssertionError(f"MEMPLAN_FUZZ_SEED={number} repeats it: {error}") from None


@pytest.mark.thorough
def test_every_seed_is_read_as_it_is(workplace):
    wrong = []
    for seed, path in workplace:
        for command in seed.commands:
            ran = outcome(seed.arguments(command, path), seed.content)
            wrong += [(seed.file, command, ran.err)] if ran.exit_code not in (0, 1) else []
    assert not wrong


FILES = {damage_a_file: FILE_CASES, read_a_bomb: OTHER_CASES, set_trainer_keys: OTHER_CASES}
OTHERS = {run_a_command_line: LINE_CASES, ask_the_page: OTHER_CASES, call_the_library: LINE_CASES}


@pytest.mark.parametrize("case", FILES)
def test_files_of_any_kind_are_answered_or_refused(workplace, case):
    searched(FILES[case], case, workplace)


@pytest.mark.parametrize("case", [*OTHERS, pytest.param(change_settings, marks=pytest.mark.thorough)])
def test_what_is_drawn_at_random_is_answered_or_refused(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    searched(OTHERS.get(case, SETTING_CASES), case)


MISTAKES = 5000
KEYS = "".join(f"a{number}b: {number}\n" for number in range(MISTAKES))
WORDS = ", ".join(f"h10{number}" for number in range(MISTAKES))
FULL_OF_MISTAKES = {
    "a training config": (f"description: x\n{KEYS}", ("fit", "gpt2", *GPU, "--config", "{}")),
    "entries of a catalog": (f"gpus: {{{WORDS.replace(',', ': {},')}: {{}}}}", ("list", "gpus", "--catalog", "{}")),
    "jobs of a budget": (f"version: 1\nbudgets: [{'{nam: q}, ' * MISTAKES}]", ("check", "{}")),
    "GPUs of a budget": (
        f"version: 1\nbudgets: [{{name: a, model: gpt2, config: lora, gpus: [{WORDS}]}}]",
        ("check", "{}"),
    ),
    "prices": (
        f"currency: USD\nprices: {{{WORDS.replace(',', ': 1,')}: 1}}",
        ("where", "gpt2", *CONFIG, "--price", "{}"),
    ),
    "a trainer's keys": ((TRAINERS / "axolotl.yaml").read_text() + KEYS, ("import", "{}")),
}


@pytest.mark.parametrize("kind", FULL_OF_MISTAKES)
def test_a_file_of_thousands_of_mistakes_is_answered_or_refused_at_once(tmp_path, kind):
    text, command = FULL_OF_MISTAKES[kind]
    path, peak = tmp_path / "file.yaml", peak_bytes()
    path.write_text(text)
    check(outcome([str(path) if word == "{}" else word for word in command]), peak)


def test_a_script_of_thousands_of_commands_that_are_no_trainers_is_refused_at_once(tmp_path):
    path, peak = tmp_path / "launch.sh", peak_bytes()
    path.write_text("".join(f"[a{number}]\n" for number in range(2500)))
    ran = outcome(["import", str(path), "--gpus", "8"])
    check(ran, peak)
    assert ran.exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", FILES)
def test_many_files_are_answered_or_refused(workplace, case):
    repeated(LONG_RUN * (9 if case is damage_a_file else 1) // 10, case, workplace)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*OTHERS, change_settings])
def test_much_that_is_drawn_at_random_is_answered_or_refused(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    repeated(LONG_RUN // {ask_the_page: 20, change_settings: 4}.get(case, 10), case)
