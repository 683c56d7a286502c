"""A plan as one HTML file: what it says, that it loads nothing, and that nothing in it is more than text."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.report.page import plan_sections
from memplan.report.page.plan_sections import text
from memplan.units import format_bytes

ASSETS = Path(plan_sections.__file__).parent / "assets"
SMALL = memplan.Shapes(layers=2, hidden=64, heads=2, vocab=256)
VOID = {"meta", "link", "br", "input", "rect"}
LEAST_CONTRAST = 4.5
HOSTILE = st.text("<>&\"'/!-sé \x00\x1b\n\u202e", max_size=40)


class Page(HTMLParser):
    """The elements of a page; it fails where one is left open."""

    def __init__(self, content):
        super().__init__()
        self.elements, self.open, self.contents = [], [], {}
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, content):
        if self.open:
            self.contents.setdefault(self.open[-1], []).append(content)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def plan():
    return memplan.plan(SMALL, gpu="rtx4090", config="qlora", sequence_length=64)


@pytest.fixture(scope="module")
def page(plan):
    return Page(plan.html("memplan fit --layers 2"))


def test_it_says_what_the_answer_says(plan, page):
    words = {word.strip() for contents in page.contents.values() for word in contents}
    verdict, _, sentence = plan.sentence.partition(": ")
    assert {verdict, sentence} <= words
    assert {"memplan", "fit", "--layers", "2"} <= set(page.contents["span"])
    assert {format_bytes(int(size)) for size in plan.components.values() if size} <= words
    assert {line.source for line in plan.memory.components} <= words


def test_the_chart_has_the_bytes_of_the_timeline(plan, page):
    (data,) = [json.loads(content) for content in page.contents["script"] if content.startswith("{")]
    totals = [sum(column) for column in zip(*data["sizes"], strict=True)]
    assert max(totals) == totals[data["peak"]] == plan.timeline.columns[plan.timeline.peak].bytes
    assert (data["usable"], data["expected"]) == (plan.usable_bytes, plan.expected_bytes)
    assert data["phases"][-1][2] == len(totals) - 1


def test_it_loads_nothing_and_runs_only_its_own_scripts(page):
    assert not {"src", "srcset", "action", "style", "srcdoc"} & {name for _, own in page.elements for name in own}
    assert {own["href"] for _, own in page.elements if "href" in own} == {"data:,"}
    assert not [name for _, own in page.elements for name in own if name.startswith("on")]
    (policy,) = (own["content"] for own in page.named("meta") if own.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    code = [content for content in (*page.contents["script"], *page.contents["style"]) if not content.startswith("{")]
    hashes = {f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" for content in code}
    assert hashes == set(re.findall(r"'sha256-[^']+'", policy))


def test_every_part_has_a_name_and_every_control_a_label(page):
    identities = [own["id"] for _, own in page.elements if "id" in own]
    assert len(identities) == len(set(identities))
    assert all(own["aria-labelledby"] in identities for own in page.named("section"))
    assert {own["for"] for own in page.named("label")} >= {own["id"] for own in page.named("input")}
    assert all("scope" in own for own in page.named("th"))
    assert len(page.named("caption")) == len(page.named("table"))
    assert page.named("html") == [{"lang": "en"}]
    assert [name for name, _ in page.elements if name in ("h1", "h2")].count("h1") == 1
    assert all("aria-label" in own or own.get("aria-hidden") == "true" for own in page.named("svg"))


def test_a_job_that_does_not_fit_shows_what_makes_it_fit():
    plan = memplan.plan("gpt2", gpu_memory="2GiB", config="fp32-adamw")
    words = {word for contents in Page(plan.html()).contents.values() for word in contents}
    assert plan.verdict == "no"
    assert "NO" in words
    assert [s.change for s in plan.suggestions if not any(word.startswith(s.change) for word in words)] == []
    assert "memplan fit" not in words


def test_what_if_changes_one_thing_at_a_time(plan):
    rows = {row.change: row for row in plan.what_if}
    base = memplan.job(SMALL, config="qlora", sequence_length=64)
    doubled = base.plan("rtx4090", micro_batch_size=2)
    assert rows["micro_batch_size=2"].device_bytes == doubled.expected_bytes
    assert rows["micro_batch_size=2"].adds_bytes == doubled.expected_bytes - base.plan("rtx4090").expected_bytes
    assert all(row.adds_bytes for row in rows.values())


def test_what_if_leaves_out_what_cannot_be():
    """GPT-2 has learned positions for 1,024 tokens."""
    job = memplan.job("gpt2", config="bf16-adamw", sequence_length=1024)
    changes = {row.change for row in job.plan("rtx4090", micro_batch_size=1).what_if}
    assert "micro_batch_size=2" in changes
    assert "sequence_length=2048" not in changes


# ------------------------------------------------------------------ hostile text
@given(HOSTILE)
@settings(max_examples=60, deadline=None)
def test_text_is_nothing_but_text(value):
    shown = Page(f"<p>{text(value)}</p>")
    assert [tag for tag, _ in shown.elements] == ["p"]


@given(HOSTILE)
@settings(max_examples=60, deadline=None)
def test_data_cannot_end_its_script(value):
    shown = Page(plan_sections.embedded("x", {"name": value + "</script><!--"}))
    assert [tag for tag, _ in shown.elements] == ["script"]
    assert json.loads(shown.contents["script"][0])["name"] == value + "</script><!--"


def test_a_name_with_a_script_is_shown_and_not_run(cli, tmp_path):
    hostile = tmp_path / "<script>alert(1)<"
    hostile.write_text("description: <img src=x onerror=alert(1)>\nweights: {default: bf16}\n")
    ran = cli("report", "gpt2", "-g", "t4", "-s", "64", "-c", hostile, "-o", tmp_path / "page.html")
    assert ran.exit_code in (0, 1)
    shown = Page((tmp_path / "page.html").read_text())
    assert not shown.named("img")
    assert len(shown.named("script")) == 3


# ------------------------------------------------------------------ the command
def test_the_command_writes_a_file_and_says_the_answer(cli, tmp_path):
    arguments = ("gpt2", "-g", "t4", "--lora", "-s", "512")
    ran = cli("report", *arguments, "-o", tmp_path / "report.html")
    content = (tmp_path / "report.html").read_text()
    assert (ran.exit_code, ran.out, "FITS" in ran.err) == (0, "", True)
    command = content.partition('<code id="command"')[2].partition("</code>")[0]
    assert re.sub("<[^>]*>", "", command.partition(">")[2]) == "memplan fit gpt2 -g t4 --lora -s 512"
    assert cli("report", *arguments, "-q").out == content


def test_the_exit_code_is_that_of_fit(cli, refused, tmp_path):
    assert cli("report", "gpt2", "--gpu-memory", "1GiB", "-o", tmp_path / "a.html").exit_code == 1
    assert "did you mean" in refused("report", "gpt2", "-g", "rtx4099", "-o", tmp_path / "b.html")


# ------------------------------------------------------------------ what it is made with
def test_the_chart_library_is_the_one_that_is_recorded():
    folder = ASSETS / "uplot"
    record = yaml.safe_load((folder / "vendored.yaml").read_text())
    assert f"{record['name']} {record['version']} ({record['licence']})" == plan_sections.CHART_LIBRARY
    assert {path.name for path in folder.iterdir()} == {"vendored.yaml", *record["files"]}
    for name, digest in record["files"].items():
        assert sha256((folder / name).read_bytes()).hexdigest() == digest
    assert "Permission is hereby granted" in (folder / "LICENSE").read_text()


def luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """Return the ratio that https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio defines."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_texts_have_contrast_in_light_dark_and_print():
    blocks = re.findall(r":root[^ ]* \{([^}]+)\}", (ASSETS / "page.css").read_text())
    assert len(blocks) == 3
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        pairs = [*product(("text", "quiet", "link", "fits", "tight", "no"), ("page", "panel")), ("text", "button")]
        assert {pair: contrast(*(colours[name] for name in pair)) for pair in pairs} == pytest.approx(
            dict.fromkeys(pairs, 21.0), abs=21 - LEAST_CONTRAST
        )
