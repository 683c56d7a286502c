"""Every shipped entry obeys the strict schema, has sources, and is found by its name and aliases."""

import re
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from memplan.catalog.catalog import SECTIONS, Catalog, data_directory
from memplan.catalog.entries import Gpu, GradientDtype, ModelEntry, Optimizer, StorageFormat
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.shipped_tables import TABLES, Link, Network, ReserveShare, table_of
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Gradients, TrainingConfig
from memplan.catalog.update_classes import entry_problems
from memplan.documents.loading import load_document
from memplan.documents.schemas import validate
from memplan.errors import InvalidFileError, MemplanError, UnknownNameError, normalised_name
from memplan.model.inventory import ROLES
from memplan.training.resolution.resolve_config import resolve
from memplan.units import GIB
from tests.jobs import yaml_data

CLASSES = {
    "gpus": Gpu,
    "formats": StorageFormat,
    "gradients": GradientDtype,
    "optimizers": Optimizer,
    "models": ModelEntry,
    "configs": TrainingConfig,
    "stacks": Stack,
}
ROOT = data_directory()
CATALOG = Catalog(ROOT)


def files(section: str) -> list[Path]:
    location = ROOT / SECTIONS[section][0]
    return sorted(location.iterdir()) if location.is_dir() else [location]


def named(path: Path, section: str) -> dict[str, object]:
    data = yaml_data(path)
    return data if SECTIONS[section][0].endswith(".yaml") else {path.stem: data}


parsed = cache(load_document)

ENTRIES = [(section, name) for section in SECTIONS for path in files(section) for name in named(path, section)]
SOURCED = [(section, name) for section, name in ENTRIES if section != "configs"]


def test_an_entry_passes_the_strict_schema_and_is_the_value_that_is_used():
    for section, name in ENTRIES:
        shelf = CATALOG.section(section)
        document = parsed(Path(shelf.origins[name]))
        keyed = SECTIONS[section][0].endswith(".yaml")
        data, path = (document.data[name], (name,)) if keyed else (document.data, ())
        assert document.problems == (), (section, name)
        assert validate(CLASSES[section], document, data, path) == shelf.entries[name], (section, name)
        assert section in ("configs", "stacks") or list(entry_problems(shelf.entries[name])) == [], (section, name)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_catalog_holds_every_entry_of_the_files_sorted(section):
    names = [name for kind, name in ENTRIES if kind == section]
    assert list(CATALOG.section(section)) == sorted(names)
    assert len(CATALOG.section(section)) == len(names) == len(set(names))


@pytest.mark.parametrize("section", [s for s in SECTIONS if SECTIONS[s][0].endswith(".yaml")])
def test_keys_stand_in_order(section):
    keys = [name for kind, name in ENTRIES if kind == section]
    assert keys == sorted(keys)


def test_names_are_lowercase_kebab():
    for section, name in ENTRIES:
        assert re.fullmatch(r"[a-z0-9]+(?:[-.][a-z0-9]+)*", name), (section, name)


@pytest.mark.parametrize("section", SECTIONS)
def test_no_two_spellings_of_a_section_are_the_same_without_case_and_separators(section):
    seen: dict[str, str] = {}
    for name, entry in CATALOG.section(section).entries.items():
        for spelling in (name, *getattr(entry, "aliases", ())):
            assert seen.setdefault(normalised_name(spelling), f"{name}/{spelling}") == f"{name}/{spelling}"


def test_an_entry_is_found_by_its_name_and_by_every_alias():
    for section, name in ENTRIES:
        shelf = CATALOG.section(section)
        for spelling in (name, *getattr(shelf.entries[name], "aliases", ())):
            assert (
                shelf.name_of(spelling)
                == shelf.name_of(spelling.upper())
                == shelf.name_of(spelling.replace("-", "_"))
                == name
            ), (section, name)


def test_an_entry_has_dated_sources_for_keys_that_it_has():
    for section, name in SOURCED:
        entry = CATALOG.section(section).entries[name]
        assert entry.sources, (section, name)
        for source in entry.sources:
            assert source.url.startswith("https://"), (section, name)
            assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", source.checked), (section, name)
            assert {key.split(".")[0] for key in source.covers} <= set(asdict(entry)), (section, name)


def test_there_are_enough_gpus_and_models():
    assert len(CATALOG.gpus) >= 50
    assert len(CATALOG.models) >= 44


# ------------------------------------------------------------------ GPUs
def test_a_gpu_offers_programs_most_of_the_memory_that_its_driver_reports():
    for name in CATALOG.gpus:
        gpu = CATALOG.gpus[name]
        assert 4 * GIB <= gpu.memory_bytes <= 1024 * GIB, name
        least = 0.66 if gpu.vendor == "apple" else 0.7  # Metal offers two thirds of 32 GB and less
        assert least * gpu.memory_bytes < gpu.cuda_total_bytes <= gpu.memory_bytes, name
        assert gpu.bandwidth_bytes_per_second > 50 * 10**9, name
        assert all(rate > 10**12 for rate in gpu.dense_flops.values()), name


@pytest.mark.parametrize("name", [n for n in CATALOG.gpus if CATALOG.gpus[n].vendor == "nvidia"])
def test_an_nvidia_gpu_has_a_compute_capability(name):
    assert re.fullmatch(r"\d+\.\d", CATALOG.gpus[name].compute_capability or "")


def test_the_label_of_a_card_is_never_arithmetic():
    assert [n for n in CATALOG.gpus if CATALOG.gpus[n].memory_bytes % 10**9 == 0] == []


def test_an_rtx_4090_has_23_99_and_23_65_gib():
    gpu = CATALOG.gpus["rtx4090"]
    assert round(gpu.memory_bytes / GIB, 2) == 23.99
    assert round(gpu.cuda_total_bytes / GIB, 2) == 23.65


@pytest.mark.parametrize(
    ("card", "laptop"),
    [("rtx3080ti", "rtx3080-laptop-16gb"), ("rtx4090", "rtx4090-laptop"), ("rtx5090", "rtx5090-laptop")],
)
def test_laptop_variants_stand_apart_where_their_memory_differs(card, laptop):
    assert CATALOG.gpus[card].memory_bytes != CATALOG.gpus[laptop].memory_bytes


@pytest.mark.parametrize("name", ["dgx-spark", "m3-ultra-512gb", "strix-halo", "jetson-agx-orin-64gb", "mi300a"])
def test_machines_whose_cpu_shares_the_memory_are_marked(name):
    assert CATALOG.gpus[name].unified_memory


@pytest.mark.parametrize(
    "name",
    [
        "rtx3060", "rtx3070", "rtx3080-10gb", "rtx3090", "rtx3090ti", "rtx4060", "rtx4060ti-16gb", "rtx4070",
        "rtx4080", "rtx4090", "rtx5060", "rtx5070ti", "rtx5080", "rtx5090", "rtx-a6000", "rtx6000-ada",
        "rtx-pro-6000-blackwell", "t4", "l4", "l40s", "a10g", "a100-pcie-40gb", "a100-sxm-80gb", "h100-pcie-80gb",
        "h100-sxm-80gb", "h200", "b200", "b300", "gh200", "gb200", "mi210", "mi250x", "mi300x", "mi325x", "mi355x",
    ],
)  # fmt: skip
def test_cards_that_people_train_on_are_there(name):
    assert name in CATALOG.gpus


# ------------------------------------------------------------------ formats
# ggml-org/ggml, src/ggml-common.h @d99724f2: sizes that its static_asserts hold, (elements, bytes) per block.
GGML_BLOCKS = {
    "fp32": (1, 4), "fp16": (1, 2), "bf16": (1, 2), "q4-0": (32, 18), "q4-1": (32, 20), "q5-0": (32, 22),
    "q5-1": (32, 24), "q8-0": (32, 34), "q8-1": (32, 36), "q2-k": (256, 84), "q3-k": (256, 110), "q4-k": (256, 144),
    "q5-k": (256, 176), "q6-k": (256, 210), "q8-k": (256, 292), "iq2-xxs": (256, 66), "iq2-xs": (256, 74),
    "iq3-xxs": (256, 98), "iq1-s": (256, 50), "iq4-nl": (32, 18), "iq3-s": (256, 110), "iq2-s": (256, 82),
    "iq4-xs": (256, 136), "iq1-m": (256, 56), "tq1-0": (256, 54), "tq2-0": (256, 66), "mxfp4": (32, 17),
    "nvfp4": (64, 36), "q1-0": (128, 18), "q2-0": (64, 18),
}  # fmt: skip


@pytest.mark.parametrize("name", GGML_BLOCKS)
def test_a_ggml_format_has_the_blocks_of_its_struct(name):
    entry = CATALOG.formats.entries[name]
    assert (entry.block_elements, entry.block_bytes, entry.tensor_bytes, entry.blocking) == (
        *GGML_BLOCKS[name],
        0,
        "row",
    )


def test_ids_of_types_in_files_are_unique():
    ids = [entry.ggml_type for entry in CATALOG.formats.entries.values() if entry.ggml_type is not None]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("name", "elements", "size"),
    [
        ("q4-0", 4096 * 4096, 4096 * 4096 * 18 // 32),
        ("iq3-xxs", 4096 * 256, 4096 * 98),
        ("fp8-e4m3", 1000, 1000),
        # bitsandbytes: a byte for two elements, an fp32 absmax for 64, a table of 16 fp32
        ("nf4", 1_048_576, 1_048_576 // 2 + 1_048_576 // 64 * 4 + 64),
        # twice: an 8-bit absmax for 64, an fp32 one for 256 of those, their table of 256 fp32 and an offset
        ("nf4-dq", 1_048_576, 1_048_576 // 2 + 1_048_576 // 64 + 1_048_576 // 64 // 256 * 4 + 64 + 1024 + 4),
    ],
)
def test_a_tensor_takes_whole_blocks_and_what_it_has_once(name, elements, size):
    assert CATALOG.formats[name].tensor_storage_bytes(elements) == size


def test_iq3_xxs_takes_98_bytes_for_256_elements_and_not_0_31_each():
    assert CATALOG.formats["IQ3_XXS"].bytes_per_element == Fraction(98, 256)


@pytest.mark.parametrize("ambiguous", ["iq2", "iq3", "q4", "q5", "q8", "nf", "fp4"])
def test_an_ambiguous_short_name_is_no_format(ambiguous):
    with pytest.raises(UnknownNameError):
        CATALOG.formats[ambiguous]


@pytest.mark.parametrize("name", ["q8-1", "q8-k"])
def test_formats_that_exist_only_in_computation_are_marked(name):
    assert not CATALOG.formats[name].storable


# ------------------------------------------------------------------ optimizers
def test_an_optimizer_that_takes_only_matrices_says_what_takes_the_rest():
    for name, entry in CATALOG.optimizers.entries.items():
        assert (entry.takes == "matrices") == (entry.rest is not None), name
        if entry.rest is not None:
            assert CATALOG.optimizers.entries[entry.rest].takes == "all"


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("sgd", Fraction(0)),
        ("adamw-fp32", Fraction(8)),
        ("adamw-bf16", Fraction(4)),
        ("adamw-8bit-bnb", Fraction(2 * 260, 256)),
        ("adamw-8bit-torchao", Fraction(2 * 260, 256)),
        ("adamw-4bit-torchao", Fraction(2 * 68, 128)),
        ("adamw-fp8-torchao", Fraction(2 * 260, 256)),
        ("muon-fp32", Fraction(4)),
        ("muon-bf16", Fraction(2)),
        ("muon-int8", Fraction(132, 128)),
        ("muon-int4", Fraction(68, 128)),
        ("muon-int2", Fraction(36, 128)),
    ],
)
def test_states_per_parameter_include_their_scales(name, states):
    slots = CATALOG.optimizers[name].slots
    found = sum((Fraction(s.block_bytes, s.block_elements) for s in slots if s.layout == "elementwise"), Fraction(0))
    assert found == states


@pytest.mark.parametrize("name", ["adafactor", "lion", "adam-mini", "sgd-momentum"])
def test_the_other_optimizers_of_the_issue_are_there(name):
    assert CATALOG.optimizers[name].slots


# ------------------------------------------------------------------ names resolve
@pytest.mark.parametrize("name", CATALOG.configs)
def test_every_name_in_a_config_resolves(name):
    config = CATALOG.configs[name]
    assert set(config.weights) | set(config.optimizer) <= {*ROLES, "default"}
    for given in config.weights.values():
        assert given in CATALOG.formats.entries
    for given in config.optimizer.values():
        assert given in CATALOG.optimizers.entries
    assert config.gradients.dtype is None or config.gradients.dtype in CATALOG.gradients.entries


@pytest.mark.parametrize(
    "name",
    [
        "fp16-adam", "fp16-muon", "q4-adam", "q4-muon-bf16", "q4-muon-int8", "tier1", "tier2", "iq3-muon-int4",
        "tier3", "q4-muon-int2", "iq2-fp8-muon-int4", "bf16-adamw", "mixed-adamw", "fp32-adamw", "bf16-adamw-8bit",
        "lora", "qlora", "muon",
    ],
)  # fmt: skip
def test_every_config_of_the_design_ships(name):
    assert name in CATALOG.configs.entries


@pytest.mark.parametrize(
    ("section", "alias", "name"),
    [
        ("models", "llama-8b", "llama-3.1-8b"),
        ("models", "Llama-3.1-8B", "llama-3.1-8b"),
        ("models", "llama3.1-8b", "llama-3.1-8b"),
        ("models", "llama_3_1_8b", "llama-3.1-8b"),
        ("models", "mistral-7b", "mistral-7b-v0.1"),
        ("gpus", "h200", "h200-sxm-141gb"),
        ("gpus", "b200", "b200-sxm-180gb"),
        ("gpus", "rtx4090", "rtx4090"),
        ("gpus", "RTX 4090", "rtx4090"),
        ("gpus", "4090", "rtx4090"),
        ("gpus", "H100_SXM_80GB", "h100-sxm-80gb"),
        ("gpus", "NVIDIA GeForce RTX 4090", "rtx4090"),
        ("gpus", "GeForce RTX 4090", "rtx4090"),
        ("gpus", "NVIDIA GeForce RTX 3060", "rtx3060"),
        ("gpus", "NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("gpus", "NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("gpus", "NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("gpus", "NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("gpus", "NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("gpus", "NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("gpus", "NVIDIA H200", "h200-sxm-141gb"),
        ("gpus", "NVIDIA B200", "b200-sxm-180gb"),
        ("gpus", "NVIDIA GB10", "dgx-spark"),
        ("gpus", "NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("gpus", "NVIDIA L40S", "l40s"),
        ("gpus", "Tesla T4", "t4"),
        ("gpus", "Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
    ],
)
def test_the_aliases_of_the_design_resolve(section, alias, name):
    assert CATALOG.section(section).name_of(alias) == name


def test_a_name_that_two_cards_share_is_not_guessed_between():
    with pytest.raises(UnknownNameError, match=r"may be rtx3080-10gb, .*: say which"):
        CATALOG.gpus.name_of("NVIDIA GeForce RTX 3080")
    with pytest.raises(UnknownNameError, match=r"may be rtx3080-laptop-16gb or rtx3080-laptop-8gb: say which"):
        CATALOG.gpus.name_of("NVIDIA GeForce RTX 3080 Laptop GPU")


def test_a_gpu_is_found_by_the_name_of_its_card():
    for name in CATALOG.gpus:
        card = CATALOG.gpus.entries[name].name
        same = [other for other, gpu in CATALOG.gpus.entries.items() if gpu.name == card]
        assert len(same) > 1 or CATALOG.gpus.name_of(card) == name, name
        assert len(same) > 1 or CATALOG.gpus.name_of(card.partition(" ")[2]) == name, f"{name} without its vendor"


def test_a_card_that_is_named_in_part_is_hinted_at():
    with pytest.raises(UnknownNameError, match="did you mean 'Apple M3 Max 128GB'"):
        CATALOG.gpus.name_of("Apple M3 Max")


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_name_gets_the_nearest_match_and_the_list(section):
    name = next(iter(CATALOG.section(section)))
    with pytest.raises(UnknownNameError) as caught:
        CATALOG.section(section)[name + "x"]
    assert f"did you mean {name!r}?" in str(caught.value)
    assert f"memplan list {section}" in str(caught.value)
    assert isinstance(caught.value, MemplanError)


# ------------------------------------------------------------------ tables
@pytest.mark.parametrize(("name", "cls"), [("links", Link), ("networks", Network), ("reserve", ReserveShare)])
def test_a_table_passes_the_strict_schema(name, cls):
    document = load_document(ROOT / TABLES[name])
    assert list(document.data) == sorted(document.data)
    rows = {key: validate(cls, document, row, (key,)) for key, row in document.data.items()}
    assert all(row.source for row in rows.values())
    assert rows == dict(table_of(ROOT, name, cls))
    assert name != "reserve" or all(
        key == f"{r.allocator}-{'coded' if r.coded else 'floats'}" for key, r in rows.items()
    )


def test_every_link_of_a_card_is_known_and_leads_to_the_host():
    assert {entry.interconnect.kind for entry in CATALOG.gpus.entries.values()} <= set(CATALOG.tables.links)
    leads = {link.host for link in CATALOG.tables.links.values()} - {"same"}
    assert all(CATALOG.tables.links[name].bytes_per_second for name in leads)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kernels": Kernels(attention="flsh")}, "kernels.attention: expected one of .*; did you mean 'flash'"),
        ({"stack": "megatrn"}, "stack: unknown stack .*; did you mean 'megatron'"),
        ({"gradients": Gradients(lifetime="steps")}, "gradients.lifetime: expected one of step, layer, got 'steps'"),
        ({"activation_checkpointing": "all"}, "activation_checkpointing: expected one of none, selective, full, got 'all'"),
        ({"allocator": "expandible"}, "allocator: .*; did you mean 'expandable'"),
    ],
)  # fmt: skip
def test_a_word_that_nothing_knows_is_refused_wherever_a_config_comes_from(keys, words):
    with pytest.raises(InvalidFileError, match=words):
        resolve(TrainingConfig("made in Python", **keys), CATALOG, "mine")
