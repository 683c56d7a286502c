"""The trace cuts the bundled optimizer's loops short: held against the same trace with every turn run.

pytest -m slow tests/trace/test_short_loops.py
"""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Gradients, Offload, TrainingConfig
from memplan.model.model import Model
from memplan.model.spec import Attention, Layer, LayerRun, MixtureOfExperts, Mlp, ModelSpec, Norm
from memplan.muon import Muon
from memplan.muon.orthogonalisation import newton_schulz
from memplan.muon.stores import chunk_loops
from memplan.muon.stores import gradient_stores as gradients
from memplan.muon.updates import steps
from memplan.muon.weights import quantised, weight_formats
from memplan.step.states.muon_scratch import CHUNK_ELEMENTS, COLUMN_CHUNK
from memplan.trace.jobs import bundled_optimizer as bundled
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
ALL = "every module"
WIDTH, INNER, VOCAB = 1280, 3848, 5003
CODED = {"embedding": "q8-0", "head": "q8-0", "router": "bf16", "norm": "fp32"}
MUON = {"hidden_matrix": "muon-int4", "default": "adamw-int8"}
CASES = {
    "q4": {"weights": {"hidden_matrix": "q4-0", **CODED}, "optimizer": MUON},
    "q8 fp8": {
        "weights": {"hidden_matrix": "q8-0", **CODED}, "optimizer": MUON, "gradients": Gradients("fp8-e4m3"),
        "gradient_accumulation_steps": 2,
    },
    "iq3 fp8 by layer": {
        "weights": {"hidden_matrix": "iq3-xxs", **CODED}, "optimizer": MUON, "gradients": Gradients("fp8-e4m3", "layer"),
    },
    "bf16 fast": {"optimizer": {"hidden_matrix": "muon-fp32", "default": "adamw-bf16"}, "kernels": Kernels(newton_schulz="fast")},
    "bf16 on host": {"optimizer": {"default": "adamw-int8"}, "offload": Offload(optimizer_states="cpu")},
    "experts": {"optimizer": {"hidden_matrix": "muon-int8", "expert_matrix": "muon-int8", "default": "adamw-int8"}},
}  # fmt: skip
MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (gradients, newton_schulz, quantised, steps, weight_formats)
}


def small_model(case: str) -> Model:
    """One layer whose matrices take from more than one to seven chunks, with odd remainders of rows and of columns."""
    experts = MixtureOfExperts(num_experts=7, experts_per_token=2, intermediate_size=776)
    layer = Layer(Attention(10, 5, 128, 128), experts if case == "experts" else Mlp(INNER), Norm())
    return Model.from_spec(ModelSpec("small", "llama", VOCAB, WIDTH, (LayerRun(layer, 1),), Norm()), "test")


def traced(case: str, name: str):
    """The trace with the loops of one module cut short, those of all, or none."""
    setup = resolve(TrainingConfig("test", sequence_length=64, **CASES[case]), CATALOG, case)
    with pytest.MonkeyPatch.context() as patch:
        for module in (module for other, module in MODULES.items() if name not in (other, ALL)):
            patch.setattr(module, "starts", every_start)
        if name != ALL:
            patch.setattr(bundled.MetaMuon, "_update", Muon._update)
        return trace_training(small_model(case), setup)


def every_start(length: int, step: int) -> range:
    return range(0, length, step)


@cache
def whole(case: str):
    """The trace with every turn of every loop, and every weight updated."""
    return traced(case, "none")


def fullest(trace) -> dict[tuple[str, str], int]:
    """The most bytes in use after any event of each operation in each instant."""
    found: dict[tuple[str, str], int] = {}
    for index, totals in trace.curve():
        event = trace.events[index]
        key = (event.instant, event.operation)
        found[key] = max(found.get(key, 0), sum(totals.values()))
    return found


def born(trace) -> Counter[tuple[str, int]]:
    return Counter((event.operation, event.bytes) for event in trace.events if event.allocates)


def test_the_matrices_have_more_than_three_chunks_and_odd_remainders():
    assert WIDTH * INNER > 4 * CHUNK_ELEMENTS < VOCAB * WIDTH
    assert all(size % CHUNK_ELEMENTS for size in (WIDTH * INNER, VOCAB * WIDTH, WIDTH * WIDTH))
    assert INNER > 7 * COLUMN_CHUNK
    assert INNER % COLUMN_CHUNK


def test_every_loop_over_chunks_is_one_that_this_test_knows():
    """Those that import ``starts``; a loop over chunks anywhere else is run whole."""
    package = Path(chunk_loops.__file__).parents[1]
    users = {path.stem for path in package.rglob("*.py") if "import starts" in path.read_text(encoding="utf-8")}
    assert users == set(MODULES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*MODULES, ALL])
def test_two_turns_of_a_loop_need_what_all_of_them_need(name, case):
    short = traced(case, name)
    assert short.instant_bytes == whole(case).instant_bytes
    assert fullest(short) == fullest(whole(case))
    assert born(short).keys() <= born(whole(case)).keys()


@pytest.mark.slow
def test_every_module_has_loops_that_are_cut_in_some_case(monkeypatch):
    """Without this, the rule above could hold for want of anything to cut; loops of more than three turns count."""
    cut = set()

    def counted(name: str):
        def starts(length: int, step: int) -> range:
            if len(every_start(length, step)) > 3:
                cut.add(name)
            return chunk_loops.starts(length, step)

        return starts

    for name, module in MODULES.items():
        monkeypatch.setattr(module, "starts", counted(name))
    for case in CASES:
        trace_training(
            small_model(case), resolve(TrainingConfig("test", sequence_length=64, **CASES[case]), CATALOG, case)
        )
    assert cut == set(MODULES)
