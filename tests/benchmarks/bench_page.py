"""The page in a headless browser: first paint, and from a control to its answer; ``python tests/benchmarks/bench_page.py``."""

import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.ui.browser import CHROMIUM, opened, served

OPENINGS, CHANGES = 9, 24


def report() -> str:
    """Return medians and the worst, in milliseconds."""
    with served() as url, opened() as browser:
        page = browser.new_page()
        page.goto("about:blank")
        paints = []
        for _ in range(OPENINGS):
            page.goto(url)
            page.wait_for_selector("body[data-full]")
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        slider = page.get_by_role("slider", name="Micro-batch, in powers of two")
        slider.focus()
        for step in range(CHANGES):
            page.keyboard.press("ArrowRight" if step % 8 < 7 else "Home")
            page.wait_for_timeout(150)
        slid = page.evaluate("performance.getEntriesByName('answer').map((one) => one.duration)")
        page.evaluate("performance.clearMeasures()")
        for model in ("qwen3-8b", "mistral-7b-v0.3", "gemma-2-9b", "llama-3.2-1b", "phi-4"):
            page.get_by_label("Model", exact=True).select_option(model)
            page.wait_for_timeout(400)
        chosen = page.evaluate("performance.getEntriesByName('answer').map((one) => one.duration)")
        rows = (("first contentful paint", paints), ("answer to a slider", slid), ("answer to another model", chosen))
        return "\n".join(
            f"{name:24} median {median(of):6.1f} ms  worst {max(of):6.1f} ms  of {len(of)}" for name, of in rows
        )


@pytest.mark.benchmark
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
def test_page():
    pytest.importorskip("playwright")
    print("\n" + report())


if __name__ == "__main__":
    print(report())
