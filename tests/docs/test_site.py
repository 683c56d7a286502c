"""The pages build as a site, strictly: no broken link, no page outside the contents."""

import subprocess
import sys

import pytest
from page_blocks import ROOT

pytest.importorskip("sphinx")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")


def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-d", str(tmp_path / "trees"), "-b", "html"]
    result = subprocess.run([*command, str(ROOT / "docs"), str(tmp_path / "site")], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "memplan fit" in (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")
