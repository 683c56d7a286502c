"""The report and the page in a real browser: seen, clicked, typed at, printed; no request leaves it.

``MEMPLAN_SCREENSHOTS=FOLDER`` keeps what was seen.
"""

import os
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright")
pytest.importorskip("starlette")
from playwright.sync_api import expect

import memplan
from tests.report.test_page import LEAST_CONTRAST, contrast
from tests.ui.browser import CHROMIUM, SCHEMES, WIDTHS, opened, served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")]
LOOKS = [(width, scheme) for width in WIDTHS for scheme in SCHEMES]
TEXTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = rgb(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = {};
  for (let node; (node = walker.nextNode());) {
    const own = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(own.tagName) || !own.getClientRects().length) continue;
    found[[...rgb(getComputedStyle(own).color).slice(0, 3), ...behind(own)].join()] = node.data.trim().slice(0, 40);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    with opened() as made:
        yield made


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(memplan.plan("gpt2", gpu="t4", config="lora", sequence_length=512).html("memplan fit gpt2"))
    return path.as_uri()


@pytest.fixture(scope="module")
def address():
    with served() as url:
        yield url


@contextmanager
def shown(browser, url, width=1440, scheme="light"):
    """Yield a page; what it asks for stays on its own origin, and nothing in it fails."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, asked, told = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto(url)
    yield page
    own = urlsplit(url)
    assert {urlsplit(one)[:2] for one in asked} == {own[:2]}
    assert told == []
    context.close()


def keep(page, name):
    if folder := os.environ.get("MEMPLAN_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def check_look(page, width):
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    hexes = {}
    for pair, text in page.evaluate(TEXTS).items():
        numbers = [round(float(part)) for part in pair.split(",")]
        hexes["#{:02x}{:02x}{:02x}".format(*numbers[:3]), "#{:02x}{:02x}{:02x}".format(*numbers[3:])] = text
    assert len(hexes) >= 3
    assert {text: contrast(*pair) for pair, text in hexes.items() if contrast(*pair) < LEAST_CONTRAST} == {}


def pixels(page):
    """Return how many colours the chart's canvas has, and how many of its pixels are drawn."""
    return page.evaluate("""() => {
      const canvas = document.querySelector('#chart canvas');
      const data = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
      return [new Set(data).size, data.filter((one) => one).length / data.length];
    }""")


# ------------------------------------------------------------------ the report
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_report_fits_and_is_legible(browser, report, width, scheme):
    with shown(browser, report, width, scheme) as page:
        page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
        check_look(page, width)
        colours, drawn = pixels(page)
        assert colours > 5
        assert drawn > 0.04
        keep(page, f"report-{width}-{scheme}")


def test_the_report_asks_for_nothing_but_itself(browser, report):
    with shown(browser, report) as page:
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0


def test_a_moment_is_hovered_stepped_to_and_zoomed(browser, report):
    with shown(browser, report) as page:
        readout = page.locator("#readout")
        assert "(peak" in readout.inner_text()
        box = page.locator("#chart .u-over").bounding_box()
        page.mouse.move(box["x"] + 10, box["y"] + 50)
        assert readout.inner_text().startswith("forward: ")
        moment = page.get_by_role("slider", name="Moment of the step")
        moment.focus()
        page.keyboard.press("End")
        assert readout.inner_text().startswith("optimizer step: ")
        assert moment.get_attribute("aria-valuetext") in readout.inner_text()
        now = page.locator("[data-now=weights]").inner_text()
        assert now.endswith("iB")
        before = page.locator("#chart canvas").screenshot()
        page.get_by_role("button", name="Zoom in").click()
        assert page.locator("#chart canvas").screenshot() != before
        page.get_by_role("button", name="Whole step").click()
        page.mouse.move(0, 0)
        assert page.locator("#chart canvas").screenshot() == before
        box = page.locator("#chart .u-over").bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 200, box["y"] + 50)
        page.mouse.up()
        assert page.locator("#chart canvas").screenshot() != before


def test_the_report_prints_in_black_on_white_with_everything_open(browser, report):
    with shown(browser, report, scheme="dark") as page:
        assert page.pdf()[:4] == b"%PDF"
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        text = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--text').trim()")
        assert text == "#1b1f24"  # the chart is drawn before the medium changes, in the colours of a light page
        page.emulate_media(media="print")
        assert page.locator("details[open]").count() == page.locator("details").count() > 2
        assert not page.get_by_role("button", name="Zoom in").is_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        check_look(page, 1440)
        keep(page, "report-print")


def test_the_report_is_read_without_scripts(browser, report):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report)
    assert page.get_by_role("heading", name="The step").is_visible()
    assert page.get_by_role("table", name="The step, phase by phase").is_visible()
    context.close()


# ------------------------------------------------------------------ the page
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_fits_and_is_legible(browser, address, width, scheme):
    with shown(browser, address, width, scheme) as page:
        page.wait_for_selector("body[data-full]")
        check_look(page, width)
        assert pixels(page)[0] > 5
        keep(page, f"page-{width}-{scheme}")


def test_the_answer_follows_the_controls(browser, address):
    with shown(browser, address) as page:
        page.wait_for_selector("body[data-full]")
        assert page.locator("#verdict").inner_text() == "FITS"
        slider = page.get_by_role("slider", name="Micro-batch, in powers of two")
        slider.focus()
        page.keyboard.press("End")
        expect(page.locator("#verdict")).to_have_text("NO")
        assert page.get_by_label("Micro-batch", exact=True).input_value() == "256"
        assert "-b 256 " in page.locator("#command").inner_text()
        page.keyboard.press("Home")
        page.get_by_label("GPU", exact=True).select_option("h100-sxm-80gb")
        page.get_by_label("Method").select_option("lora")
        page.get_by_label("Precision").select_option("fp16")
        expect(page.locator("#command")).to_contain_text("compute_dtype=fp16")
        expect(page.locator("#said")).to_contain_text("h100-sxm-80gb", timeout=20_000)
        assert "gpu=h100-sxm-80gb" in page.url
        assert page.get_by_role("table", name="One change at a time").is_visible()


def test_a_refused_job_is_said_and_the_page_goes_on(browser, address):
    with shown_with_errors(browser, address) as page:
        page.get_by_label("Model", exact=True).select_option("gpt2")
        page.get_by_role("slider", name="Sequence length, in powers of two").press("End")
        alert = page.get_by_role("alert")
        expect(alert).not_to_be_empty()
        assert "\n" not in alert.inner_text()
        marks = "getComputedStyle(document.getElementById('answer-title'), '::after').content"
        assert "last job that was planned" in page.evaluate(marks)
        keep(page, "page-refused")
        page.get_by_label("Sequence length", exact=True).fill("1024")
        expect(alert).to_be_empty()
        assert page.evaluate(marks) == "none"


@contextmanager
def shown_with_errors(browser, url):
    """Yield a page on which the browser notes answers that are no 200."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


def test_every_control_is_reached_by_keyboard_in_order(browser, address):
    with shown(browser, address) as page:
        page.wait_for_selector("body[data-full]")
        reached = []
        for _ in range(16):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        wanted = ["model", "gpu", "config", "stack", "precision", "checkpointing", "gpus", "batch", "length", "Copy"]
        assert [one for one in reached if one in wanted] == wanted


def test_a_site_elsewhere_may_not_frame_or_ask(browser, address, tmp_path):
    (tmp_path / "evil.html").write_text(
        f"<iframe src='{address}'></iframe><script>fetch('{address}').catch(() => {{ document.title = 'refused'; }})</script>"
    )
    with shown_with_errors(browser, (tmp_path / "evil.html").as_uri()) as page:
        expect(page).to_have_title("refused")
        assert page.frames[-1].locator("#answer").count() == 0
