"""Device contexts, workspaces, communicators and clouds' instances: data with sources, and ranges that hold what was measured."""

import json
import re
from pathlib import Path

import pytest

from memplan.catalog.catalog import Catalog, data_directory
from memplan.catalog.entries import Gpu
from memplan.catalog.hardware.contexts import ENOUGH, context_range, measured_bytes
from memplan.catalog.hardware.hardware_tables import (
    BlasWorkspace,
    Communicator,
    ContextEntry,
    entry_name,
    hardware_tables,
)
from memplan.catalog.shipped_tables import TABLES, Instances
from memplan.documents.loading import load_document
from memplan.documents.schemas import validate
from memplan.errors import InvalidFileError
from memplan.library.lookup.device_lookup import find_device
from memplan.plan.allowances import allowances_for, communicator_of
from memplan.units import MIB

ROOT = data_directory()
HARDWARE = hardware_tables(ROOT)
RECORDS = Path(__file__).parent.parent / "records" / "cuda"


def card(capability: str | None) -> Gpu:
    return Gpu.of_memory("some card", 2**34, "stated", capability)


@pytest.mark.parametrize(
    ("name", "cls"), [("contexts", ContextEntry), ("workspaces", BlasWorkspace), ("communicators", Communicator)]
)
def test_a_table_passes_the_strict_schema(name, cls):
    document = load_document(ROOT / TABLES[name])
    assert list(document.data) == sorted(document.data)
    rows = {key: validate(cls, document, row, (key,)) for key, row in document.data.items()}
    assert rows == dict(getattr(HARDWARE, name))


def test_an_instance_names_its_gpu_and_how_many_it_has():
    document, catalog = load_document(ROOT / TABLES["instances"]), Catalog(ROOT)
    rows = {key: validate(Instances, document, row, (key,)) for key, row in document.data.items()}
    assert set(rows) <= set(catalog.gpus.entries)
    names = [name.lower() for row in rows.values() for name in row.counts]
    assert len(set(names)) == len(names)
    assert catalog.tables.instance("Standard_ND96asr_v4") == ("a100-sxm-40gb", 8)
    assert find_device("G5.xlarge", None, 1, catalog).name == "a10g"
    with pytest.raises(
        InvalidFileError, match=r"p4d.24xlarge has 8 a100-sxm-40gb: --gpus \"8x a100-sxm-40gb\" for all"
    ):
        find_device("p4d.24xlarge", None, 1, catalog)


@pytest.mark.parametrize("name", list(HARDWARE.contexts))
def test_a_measurement_has_a_dated_source_and_a_positive_size(name):
    for item in HARDWARE.contexts[name].measured:
        assert item.url.startswith("https://") or (ROOT / item.url).is_dir()
        assert re.fullmatch(r"2026-\d\d-\d\d", item.checked)
        assert item.card
        assert 100 * MIB < measured_bytes(item) < 1000 * MIB


def test_contexts_differ_by_more_than_a_factor_of_five():
    assert 5 * context_range(card("7.5"), HARDWARE).expected_bytes < context_range(card("9.0"), HARDWARE).expected_bytes


@pytest.mark.parametrize("gpu", ["t4", "v100-sxm2-16gb", "rtx3090", "rtx4090", "a100-sxm-80gb", "h100-sxm-80gb"])
def test_a_range_holds_every_run_on_its_architecture(catalog, gpu):
    card = catalog.gpus[gpu]
    found = context_range(card, HARDWARE)
    runs = [i for i in HARDWARE.contexts[entry_name(card, HARDWARE.contexts)].measured if i.run == "whole"]
    assert found.least_bytes <= found.expected_bytes <= found.most_bytes
    assert all(found.least_bytes <= measured_bytes(item) <= found.most_bytes for item in runs)


def test_the_range_of_an_h200_is_that_of_the_records(catalog):
    found = context_range(catalog.gpus["h200-sxm-141gb"], HARDWARE)
    sizes = {
        json.loads(path.read_text())["measurement"]["counters"]["context_bytes"] for path in RECORDS.glob("*.json")
    }
    assert {found.expected_bytes, found.most_bytes} <= sizes | {853_540_864}
    assert found.least_bytes <= min(sizes)
    assert max(sizes) <= found.most_bytes


@pytest.mark.parametrize(("capability", "nearest"), [("7.0", ("sm-6.0", "sm-7.5")), ("10.0", ("sm-9.0", "sm-12.0"))])
def test_where_nothing_was_measured_the_nearest_stand_in_and_the_answer_says_so(capability, nearest):
    found = context_range(card(capability), HARDWARE)
    assert "no run was measured" in found.source
    runs = [i for name in nearest for i in HARDWARE.contexts[name].measured if i.run == "whole"]
    assert all(name in found.source for name in nearest)
    assert found.most_bytes >= max(map(measured_bytes, runs))


def test_few_runs_are_joined_by_the_nearest_but_expect_their_own():
    own = HARDWARE.contexts["sm-12.0"].measured
    assert 0 < len(own) < ENOUGH
    found = context_range(card("12.0"), HARDWARE)
    assert found.expected_bytes in map(measured_bytes, own)
    assert found.most_bytes >= context_range(card("9.0"), HARDWARE).most_bytes


@pytest.mark.parametrize("capability", [None, "5.2"])
def test_an_unknown_card_is_given_the_largest_of_today(capability):
    known, unknown = context_range(card("9.0"), HARDWARE), context_range(card(capability), HARDWARE)
    assert (known.expected_bytes, known.most_bytes) == (unknown.expected_bytes, unknown.most_bytes)
    assert "of this card nothing was measured" in unknown.source


@pytest.mark.parametrize(
    ("gpu", "size"),
    [
        ("t4", 8_519_680),
        ("rtx4090", 8_519_680),
        ("h100-sxm-80gb", 32 * MIB),
        ("rtx5090", 32 * MIB),
        ("mi300x", 128 * MIB),
    ],
)
def test_workspaces_are_those_of_the_source(catalog, gpu, size):
    share = catalog.tables.reserve_share("native", False)
    allowances = allowances_for(catalog.gpus[gpu], 1, share, HARDWARE)
    assert allowances.library_bytes == 2 * size
    assert "CublasHandlePool.cpp" in allowances.library_source


def test_two_gpus_have_a_smaller_communicator_than_more(catalog):
    gpu = catalog.gpus["a100-sxm-80gb"]
    assert communicator_of(gpu, 2, HARDWARE).expected_bytes == 544 * MIB
    assert communicator_of(gpu, 8, HARDWARE).expected_bytes == 688 * MIB
    assert communicator_of(catalog.gpus["mi300x"], 2, HARDWARE).expected_bytes == 1024 * MIB


def test_the_answer_names_its_range(cli):
    ran = cli("explain", "gpt2", "--gpu", "t4")
    assert "on sm-7.5 (configs/hardware/contexts.yaml)" in ran.out
