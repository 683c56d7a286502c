"""A user's own file or folder adds to the catalog or overrides it, under the same rules as ours."""

import pickle
from pathlib import Path

import pytest

from memplan.catalog.catalog import SECTIONS, Catalog, data_directory
from memplan.errors import CatalogError, InvalidFileError

GPU = """\
  name: My Card
  vendor: nvidia
  architecture: custom
  memory_bytes: 17_179_869_184
  memory_kind: measured
  cuda_total_bytes: 17_000_000_000
  cuda_total_kind: measured
  bandwidth_bytes_per_second: 1_000_000_000_000
  dense_flops: {bf16: 100_000_000_000_000}
  interconnect: {kind: pcie-4-x16, bytes_per_second: 32_000_000_000}
  unified_memory: false
  sources: [{url: "https://example.org/card", checked: 2026-01-31}]
"""
MODEL = """\
title: My Model
architecture: llama
hf_id: me/my-model
expected_parameters: 1
aliases: [mine]
config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 100}
sources: [{url: "https://example.org/model", checked: 2026-01-31}]
"""


def entry(name: str, aliases: str = "", indent: str = "") -> str:
    extra = f"  aliases: [{aliases}]\n" if aliases else ""
    return "".join(f"{indent}{line}\n" for line in f"{name}:\n{GPU}{extra}".splitlines())


def section(body: str, name: str = "gpus") -> str:
    return f"{name}:\n" + "".join(f"  {line}\n" for line in body.splitlines())


def with_extra(path: Path) -> Catalog:
    return Catalog(data_directory(), path)


def test_a_file_adds_an_entry_and_its_aliases(write, catalog):
    extended = with_extra(write("mine.yaml", section(entry("my-card", "mycard16, garage"))))
    assert extended.gpus["My Card"] == extended.gpus["GARAGE"]
    assert extended.gpus["my-card"].memory_bytes == 16 * 2**30
    assert len(extended.gpus) == len(catalog.gpus) + 1
    assert list(extended.gpus) == sorted(extended.gpus)


def test_a_catalog_can_be_sent_to_another_process(write):
    extended = with_extra(write("mine.yaml", section(entry("RTX_4090", "garage"))))
    assert extended.gpus.name_of("garage") == "RTX_4090"
    for name in SECTIONS:
        assert dict(pickle.loads(pickle.dumps(extended)).section(name).names) == dict(extended.section(name).names)


def test_an_entry_of_the_same_name_overrides_ours_whatever_the_spelling(write, catalog):
    extended = with_extra(write("mine.yaml", section(entry("RTX_4090"))))
    assert extended.gpus["rtx4090"].name == "My Card"
    assert len(extended.gpus) == len(catalog.gpus)


def test_an_entry_named_like_our_alias_takes_its_entrys_place(write):
    assert with_extra(write("mine.yaml", section(entry("4090")))).gpus["4090"].name == "My Card"


def test_sections_that_the_file_leaves_out_are_ours(write, catalog):
    extended = with_extra(write("mine.yaml", section(entry("my-card"))))
    assert dict(extended.formats.entries) == dict(catalog.formats.entries)
    assert dict(extended.configs.entries) == dict(catalog.configs.entries)


@pytest.mark.parametrize("place", ["gpu_catalog.yaml"])
def test_a_folder_is_laid_out_like_ours(write, tmp_path, place):
    write(place, entry("my-card"))
    write("configs/models/my-model.yaml", MODEL)
    write("configs/training/my-config.yaml", "description: mine\nweights: {default: fp32}\n")
    extended = with_extra(tmp_path)
    assert extended.gpus["my-card"].name == "My Card"
    assert extended.models["mine"].title == "My Model"
    assert extended.configs["my-config"].weights == {"default": "fp32"}


def test_the_hash_tells_catalogs_apart(write, catalog):
    first = with_extra(write("a.yaml", section(entry("my-card"))))
    second = with_extra(write("b.yaml", section(entry("other-card"))))
    assert len({catalog.hash, first.hash, second.hash}) == 3
    assert catalog.hash == Catalog(data_directory()).hash


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            section(entry("my-card").replace("17_179_869_184", "'16 GB'")),
            r"mine\.yaml:6: gpus\.my-card\.memory_bytes: expected an integer, got '16 GB'",
        ),
        (
            section(entry("my-card").replace("vendor: nvidia", "vendr: nvidia")),
            r"mine\.yaml:4: gpus\.my-card\.vendr: unknown key; did you mean 'vendor'\?",
        ),
        (
            section(entry("my-card").replace("  unified_memory: false\n", "")),
            r"mine\.yaml:2: gpus\.my-card\.unified_memory: required key is missing",
        ),
        (
            section(entry("my-card") + entry("my-card")),
            r"mine\.yaml:15: gpus\.my-card: duplicate key, first given on line 2",
        ),
        (section(entry("my-card"), "gpu"), r"mine\.yaml:1: gpu: unknown section; did you mean 'gpus'\?"),
        (section(entry("my-card"), "colours"), r"mine\.yaml:1: colours: unknown section; known: gpus, formats"),
        ("gpus: [1]", r"mine\.yaml:1: gpus: expected entries by name"),
        ("gpus: {my-card: 3}", r"mine\.yaml:1: gpus\.my-card: expected keys and values, got 3"),
        ("just text", r"mine\.yaml:1: expected keys and values"),
        ("gpus: {a: ", r"mine\.yaml:\d+: not valid YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_file_line_and_key(write, text, message):
    with pytest.raises(InvalidFileError, match=message):
        with_extra(write("mine.yaml", text)).gpus  # noqa: B018


def test_all_problems_of_all_entries_are_reported_at_once(write):
    broken = entry("card-a").replace("nvidia", "nvidea") + entry("card-b").replace("17_000_000_000", "big")
    with pytest.raises(InvalidFileError) as caught:
        with_extra(write("mine.yaml", section(broken))).gpus  # noqa: B018
    assert [problem.split(": ")[1] for problem in caught.value.problems] == [
        "gpus.card-a.vendor",
        "gpus.card-b.cuda_total_bytes",
    ]


@pytest.mark.parametrize(
    ("kind", "body", "key"),
    [
        ("gpus", entry("x").replace("17_179_869_184", "0"), "memory_bytes"),
        ("gpus", entry("x").replace("17_000_000_000", "-1"), "cuda_total_bytes"),
        ("gpus", entry("x").replace("17_000_000_000", "17_179_869_185"), "cuda_total_bytes"),
        ("gpus", entry("x").replace("17_179_869_184", "1" + "0" * 30), "memory_bytes"),
        ("gpus", entry("x").replace("bf16: 100", "bf16: -100"), "dense_flops.bf16"),
        ("gpus", entry("x") + "  compute_capability: sm90\n", "compute_capability"),
        (
            "formats",
            "x: {title: X, block_elements: 0, block_bytes: 1, training: frozen, description: d, sources: []}",
            "block_elements",
        ),
        (
            "formats",
            "x: {title: X, block_elements: 1, block_bytes: -1, training: frozen, description: d, sources: []}",
            "block_bytes",
        ),
        ("gradients", "x: {title: X, element_bytes: 0, description: d, sources: []}", "element_bytes"),
        (
            "optimizers",
            "x: {title: X, algorithm: sgd, description: d, sources: [], implementation: untraced, step: tensor, "
            "scratch: {form: untraced}, slots: [{name: s, block_elements: 0}]}",
            "slots.0.block_elements",
        ),
    ],
)
def test_figures_that_no_arithmetic_can_use_are_refused(write, kind, body, key):
    with pytest.raises(InvalidFileError) as caught:
        with_extra(write("mine.yaml", section(body, kind))).section(kind)
    (problem,) = caught.value.problems
    assert f": {kind}.x.{key}: expected a" in problem


def test_two_of_a_users_entries_cannot_share_an_alias(write):
    text = section(entry("card-a", "same") + entry("card-b", "same"))
    with pytest.raises(CatalogError, match="'same' already names 'card-a'"):
        with_extra(write("mine.yaml", text)).gpus  # noqa: B018


def test_a_catalog_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidFileError, match="no such file or folder"):
        with_extra(tmp_path / "absent")


def test_a_folder_without_any_section_is_refused(tmp_path):
    with pytest.raises(InvalidFileError, match="holds none of"):
        with_extra(tmp_path)


@pytest.mark.parametrize("name", sorted(set(SECTIONS) - {"gpus"}))
def test_every_section_may_be_extended(write, catalog, name):
    shelf = with_extra(write("mine.yaml", f"{name}: {{}}")).section(name)
    assert list(shelf) == list(catalog.section(name))


# ------------------------------------------------------------------ on the command line
def test_the_command_takes_a_catalog(cli, write):
    path = write("mine.yaml", section(entry("my-card")))
    ran = cli("fit", "gpt2", "--gpu", "my-card", "--config", "bf16-adamw", "--json", "--catalog", path)
    assert ran.data["gpu"] == {
        "name": "my-card",
        "count": 1,
        "memory_bytes": 17_179_869_184,
        "usable_bytes": 17_000_000_000,
    }


def test_the_environment_names_a_catalog_too(cli, write, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CATALOG", str(write("mine.yaml", section(entry("my-card")))))
    assert cli("show", "my-card", "--json").data["memory_bytes"] == 17_179_869_184


def test_the_option_goes_before_the_environment(cli, write, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CATALOG", "/nonexistent/catalog.yaml")
    assert cli("show", "my-card", "--catalog", write("mine.yaml", section(entry("my-card")))).exit_code == 0


def test_a_users_config_and_model_are_planned(cli, write):
    text = section("my-config:\n  description: mine\n  weights: {default: fp32}\n  compute_dtype: fp32\n", "configs")
    text += section("my-model:\n" + "".join(f"  {line}\n" for line in MODEL.splitlines()), "models")
    path = write("mine.yaml", text)
    plan = cli("fit", "mine", "--gpu", "t4", "--config", "my-config", "--json", "--catalog", path).data
    assert plan["config"] == "my-config"
    assert plan["model"]["name"] == "My Model"
    assert plan["training"]["weights"]["norm"] == "fp32"
    row = cli("list", "configs", "--json", "--catalog", path).data["rows"]
    assert "my-config" in {item["name"] for item in row}
    changed = cli(
        "fit",
        "mine",
        "--gpu",
        "t4",
        "--config",
        "my-config",
        "--set",
        "micro_batch_size=2",
        "--json",
        "--catalog",
        path,
    )
    assert changed.data["training"]["micro_batch_size"] == 2


def test_a_mistake_in_a_users_config_names_its_line(refused, write):
    path = write("mine.yaml", section("my-config:\n  description: mine\n  micro_batch_size: 0\n", "configs"))
    line = refused("fit", "gpt2", "--gpu", "t4", "--config", "my-config", "--catalog", path)
    assert "my-config" in line
    assert "micro_batch_size: expected a whole number from 1" in line


def test_an_invalid_catalog_exits_with_2_and_one_line(refused, write):
    line = refused("list", "gpus", "--catalog", write("mine.yaml", "gpus: {x: 3}"))
    assert "mine.yaml:1: gpus.x: expected keys and values, got 3" in line


def test_a_missing_catalog_exits_with_2_and_one_line(refused):
    assert "no such file or folder" in refused("list", "gpus", "--catalog", "/nonexistent/x.yaml")
