"""A headless browser, and the page served for it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

WIDTHS, SCHEMES = (360, 768, 1440), ("light", "dark")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


@contextmanager
def opened() -> Iterator[object]:
    """Yield a browser that is this machine's own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def served() -> Iterator[str]:
    """Yield the address that ``memplan ui`` prints."""
    command = [sys.executable, "-m", "memplan", "ui"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(20)
