"""What several folders of tests share: the catalog, setups and plans by name, and the command in process."""

import contextlib
import gc
import io
import json
import os
import pickle
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.library.lookup import catalog_model
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup
from tests.jobs import shipped_catalog

if os.environ.get("PYTHONDONTWRITEBYTECODE") != "mutants":  # else processes of tests compile the package each
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["OMP_NUM_THREADS"] = "1"  # workers share the cores: threads of torch's would wait for each other


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files with what is printed now")


def pytest_ignore_collect(collection_path, config):
    """Leave benchmarks out, which import much, where none is asked for."""
    return True if collection_path.name == "benchmarks" and "not benchmark" in config.option.markexpr else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker neighbouring tests, which share fixtures and what is played once, until one of them is idle."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test that is marked ``one_in(n)`` leave each n-th, and make the others slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collection_finish():
    """Leave what was imported out of garbage collection, which otherwise passes over torch's objects again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.fixture(scope="module")
def new_garbage_alone() -> None:
    """Leave what earlier tests made out of garbage collection too, where the tests of a module ask for one each."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    exit_code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ran]


@pytest.fixture(scope="session", autouse=True)
def played_once() -> Iterator[None]:
    """Tell a run's events, and play them through the simulated allocator, once: most jobs come often, each with a catalog of its own.

    What goes into a run decides its events, and these what comes out; the last fifty runs are kept with their events.
    """
    from memplan.plan.reserve.simulated_run import Simulation
    from memplan.plan.reserve.simulation import Runs

    told: OrderedDict[object, Simulation] = OrderedDict()
    played: dict[object, object] = {}
    real_run, real = Runs.__getitem__, Simulation._played

    def run(runs, plan):
        inputs = plan.own, plan.setup, plan.states, plan.values, plan.evaluated_values, plan.allowances.library_bytes
        question = pickle.dumps(inputs), tuple(runs._placements)
        if plan.rank_plans or question not in told:
            told[question] = real_run(runs, plan)
            if len(told) > 50:
                told.popitem(last=False)
        told.move_to_end(question)
        return told[question]

    last: list[object] = [None, 0]  # a run is played several times in turn

    def events_hash(stream):
        if last[0] is not stream:
            last[:] = stream, hash((array("q", stream._blocks).tobytes(), array("q", stream._codes).tobytes()))
        return last[1]

    def once(simulation, capacity_bytes=None, *, downwards=True, releases=True):
        stream = events_hash(simulation._stream)
        question = stream, simulation._expandable, capacity_bytes, downwards, releases
        if question not in played:
            played[question] = real(simulation, capacity_bytes, downwards=downwards, releases=releases)
        return played[question]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runs, "__getitem__", run)
        patch.setattr(Simulation, "_played", once)
        yield


def _of_files(value: object) -> bool:
    """Whether a question has standard input in it, or the name of something that lies there: what it says may change."""
    if isinstance(value, str | os.PathLike):
        return str(value) == "-" or os.path.lexists(value)
    return isinstance(value, list | tuple | set | dict) and any(map(_of_files, value))


SURROUNDINGS = (
    "PATH",
    "HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HOME",
    "XDG_CACHE_HOME",
    "HF_ENDPOINT",
    "MEMPLAN_CATALOG",
)
"""Variables of the environment that answers depend on."""


@pytest.fixture(scope="session")
def answers() -> OrderedDict[str, object]:
    """The last answers to questions of modules that ask with ``answered_once``."""
    return OrderedDict()


@pytest.fixture(scope="module")
def answered_once(answers) -> Iterator[None]:
    """Answer once what several tests ask; answers are values, and are written anew each time."""
    import memplan
    from memplan.library.answers import planned_job

    def asked_once(function):
        def ask(*args, catalog=None, progress=None, **options):
            passed = {"progress": progress} if progress is not None else {}
            own = catalog is not None and (catalog.extra is not None or catalog.root != shipped_catalog().root)
            if own or _of_files([*args, *options.values()]):
                return function(*args, catalog=catalog, **passed, **options)
            machine = [os.environ.get(name) for name in SURROUNDINGS]
            question = repr((function.__name__, args, sorted(options.items()), machine))
            if question not in answers:
                answers[question] = function(*args, catalog=catalog, **passed, **options)
                if len(answers) > 100:
                    answers.popitem(last=False)
            answers.move_to_end(question)
            return answers[question]

        return ask

    names = ("compare", "fit", "frontier", "largest", "plan", "suggest", "suggest_configs", "where")
    with pytest.MonkeyPatch.context() as patch:
        for module, name in [*((memplan, name) for name in names), (planned_job, "plan_at_a_glance")]:
            patch.setattr(module, name, asked_once(getattr(module, name)))
        yield


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return shipped_catalog()


@pytest.fixture
def cli(monkeypatch) -> Cli:
    """Run the installed entry point in this process, as if piped, with no driver and no settings of the caller."""
    from memplan.cli.main import run

    for name in ("MEMPLAN_CATALOG", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")

    def call(*arguments: object, stdin: bytes = b"") -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["memplan", *map(str, arguments)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
                run()
        gc.enable()
        code = left.value.code
        return Ran(code if isinstance(code, int) else int(code is not None), out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def refused(cli) -> Callable[..., str]:
    """Run a command that must end with one readable line; return that line."""

    def call(*arguments: object, code: int = 2, stdin: bytes = b"") -> str:
        ran = cli(*arguments, stdin=stdin)
        lines = ran.err.splitlines()
        assert (ran.exit_code, ran.out, len(lines)) == (code, "", 1), f"{ran.exit_code}\n{ran.out}\n{ran.err}"
        assert lines[0].startswith("memplan: ")
        return lines[0]

    return call


@pytest.fixture(scope="session")
def model(catalog) -> Callable[[str], Model]:
    return lambda name: catalog_model(catalog.models.name_of(name), catalog)


@pytest.fixture(scope="session")
def setup_of(catalog) -> Callable[..., TrainingSetup]:
    """A setup: a shipped config by name, or one made from the keys of a training config."""

    def make(name: str | None = None, **keys: Any) -> TrainingSetup:
        if name is not None:
            assert not keys
            return resolve(catalog.configs[name], catalog, name)
        return resolve(TrainingConfig(description="made by a test", **keys), catalog, "test")

    return make


@pytest.fixture(scope="session")
def plan_of(catalog, model, setup_of) -> Callable[..., MemoryPlan]:
    """The plan of a catalog model under a shipped config on a catalog GPU."""

    def make(
        name: str, config: str, gpu: str = "h100", batch: int | None = None, length: int | None = None
    ) -> MemoryPlan:
        device = Device(catalog.gpus[gpu], catalog.gpus.name_of(gpu))
        return CompiledPlan(model(name), setup_of(config)).evaluate(device, batch, length)

    return make


@pytest.fixture
def write(tmp_path) -> Callable[[str, str | bytes], Path]:
    """Write a file in a fresh folder and return its path."""

    def make(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make
