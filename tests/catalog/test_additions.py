"""An addition touches one place, and what it leaves out is refused by name."""

import pytest
import yaml

from memplan.catalog.catalog import Catalog, data_directory
from memplan.errors import InvalidFileError

from .additions import AMSGRAD, CODED, CONFIG, FROZEN, GPU, NOBODYS, RMSPROP, catalog_text

ADDED = {
    "gpu": ("gpus", GPU),
    "frozen format": ("formats", FROZEN),
    "trained format": ("formats", CODED),
    "optimizer": ("optimizers", AMSGRAD),
    "optimizer of a class of one's own": ("optimizers", RMSPROP),
    "untraced optimizer": ("optimizers", NOBODYS),
    "config": ("configs", CONFIG),
}
REQUIRED = [
    (kind, key)
    for kind, (section, body) in ADDED.items()
    for key in yaml.safe_load(body)
    if (section, key) not in {("configs", "optimizer"), ("optimizers", "options")}
]
FIT = ("fit", "llama-3.2-1b", "--json")


def opened(write, section, body):
    return Catalog(data_directory(), write("mine.yaml", catalog_text(section, body))).section(section)


def without(body, key):
    data = yaml.safe_load(body)
    del data[key]
    return yaml.safe_dump(data, sort_keys=False).replace("\n", "\n  ").strip()


@pytest.mark.parametrize("kind", ADDED)
def test_an_entry_is_added_in_one_place(write, kind):
    section, body = ADDED[kind]
    assert "mine" in opened(write, section, body)


@pytest.mark.parametrize(("kind", "key"), REQUIRED)
def test_a_key_that_is_left_out_is_refused_by_name(write, kind, key):
    section, body = ADDED[kind]
    with pytest.raises(InvalidFileError, match=rf"{section}\.mine\.{key}: required key is missing"):
        opened(write, section, "  " + without(body, key))


@pytest.mark.parametrize(
    ("kind", "old", "new", "words"),
    [
        ("gpu", "pcie-4-x16", "pcie-4-x61", r"interconnect\.kind: no link is called 'pcie-4-x61'; did you mean 'pcie-4-x16'"),
        ("gpu", "32_000_000_000}", "32_000_000_000, host: pcie-9}", r"interconnect\.host: no link to the host is called 'pcie-9'"),
        ("trained format", "codec: q4-0", "codec: q4_1", r"codec: no codec is called 'q4_1'; did you mean 'q4-0'"),
        ("trained format", "training: coded", "training: frozen", r"codec: goes with training: coded, not frozen"),
        ("trained format", "training: coded", "training: code", r"training: expected float, coded or frozen, got 'code'; did you mean 'coded'"),
        ("frozen format", "training: frozen", "training: float", r"training: blocks are no floats"),
        ("optimizer", "form: adamw", "form: adam", r"scratch\.form: expected .*, got 'adam'; did you mean 'adamw'"),
        ("optimizer", "form: adamw", "form: lion", r"scratch\.form: torch\.optim\.AdamW takes adamw, not lion"),
        ("optimizer", "form: adamw", "form: chunks", r"scratch\.form: chunks is what memplan\.muon\.Muon takes"),
        ("optimizer", "form: adamw", "form: untraced", r"scratch\.form: untraced says that torch\.optim\.AdamW is not modelled"),
        ("optimizer", "step: torch", "step: tensors", r"step: expected torch, tensor or in-place, got 'tensors'; did you mean 'tensor'"),
        ("optimizer", "torch.optim.AdamW", "adamw", r"implementation: no class is called 'adamw'; did you mean 'torch\.optim\.AdamW'"),
        ("optimizer", "  options: {amsgrad: true}\n", "", r"options: torch\.optim\.AdamW keeps max_exp_avg_sq with option amsgrad alone"),
        ("optimizer", "name: max_exp_avg_sq", "name: third", r"slots: keeps third, which torch\.optim\.AdamW does not"),
        ("untraced optimizer", "largest_tensor: 3", "largest_tensor: 0", r"scratch: all_tensors and largest_tensor count the copies"),
    ],
)  # fmt: skip
def test_a_value_that_nothing_knows_is_refused_with_the_nearest_match(write, kind, old, new, words):
    section, body = ADDED[kind]
    assert old in body
    with pytest.raises(InvalidFileError, match=words):
        opened(write, section, body.replace(old, new))


# ------------------------------------------------------------------ what is added is planned
def test_three_slots_and_their_declared_scratch_are_planned_and_named(cli, write):
    path = write("mine.yaml", catalog_text("optimizers", NOBODYS) + catalog_text("configs", CONFIG))
    plan = cli(*FIT, "--gpu", "h200", "--config", "mine", "--catalog", path).data
    instants = {row["name"]: row["requested_bytes"] for row in plan["instants"]}
    states = next(row["bytes"] for row in plan["components"] if row["name"] == "optimizer_states")
    largest = 128_256 * 2048 * 2
    assert states == 3 * 4 * plan["model"]["parameters"]
    assert plan["persistent_bytes"] + 3 * largest <= instants["optimizer step"]
    assert any("mine update" in line and "no class is named to trace it" in line for line in plan["not_modelled"])
    assert plan["status"] == "untried"


def test_a_frozen_format_can_be_frozen_and_not_trained(cli, refused, write):
    path = write("mine.yaml", catalog_text("formats", FROZEN))
    given = ("--gpu", "rtx4090", "--set", "weights.hidden_matrix=mine", "--catalog", path)
    assert cli(*FIT, "--config", "qlora", *given, "--stack", "bundled").exit_code == 0
    words = "trl does not train over weights in mine; use one of nf4, nf4-dq, llm-int8"
    assert words in refused(*FIT, "--config", "qlora", *given, code=3)
    assert "weights in mine cannot be trained" in refused("fit", "llama-3.2-1b", "--config", "tier1", *given, code=3)


@pytest.mark.parametrize(
    "command", [("fit", "llama-3.2-1b"), ("max",), ("suggest", "llama-3.2-1b", "--keep", "weights")]
)
def test_codes_that_nothing_codes_again_are_refused_by_name(refused, command):
    given = ("--gpu", "rtx4090", "--config", "tier1", "--set", "weights.hidden_matrix=iq1-s")
    assert "weights in iq1-s cannot be trained" in refused(*command, *given, code=3)


def test_a_format_that_names_a_codec_is_planned_as_the_codecs_own(cli, write):
    path = write("mine.yaml", catalog_text("formats", CODED))
    given = ("--gpu", "rtx4090", "--config", "tier1", "--catalog", path)
    own = cli(*FIT, *given, "--set", "weights.hidden_matrix=mine").data
    assert own["peak"]["requested_bytes"] == cli(*FIT, *given).data["peak"]["requested_bytes"]


def test_a_card_with_another_link_says_what_leads_to_the_host(cli, refused, write):
    link = "interconnect: {kind: nvlink-9, bytes_per_second: 32_000_000_000}"
    body = GPU.replace("interconnect: {kind: pcie-4-x16, bytes_per_second: 32_000_000_000}", link)
    path = write("mine.yaml", catalog_text("gpus", body))
    assert "no link is called 'nvlink-9'" in refused(*FIT, "--gpu", "mine", "--config", "lora", "--catalog", path)
    path = write(
        "mine.yaml", catalog_text("gpus", body.replace("32_000_000_000}", "32_000_000_000, host: pcie-5-x16}"))
    )
    assert cli(*FIT, "--gpu", "mine", "--config", "lora", "--catalog", path).exit_code == 0
