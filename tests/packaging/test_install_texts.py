"""No text tells people to install memplan from an index that does not have it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [
    *sorted((ROOT / "memplan").rglob("*.py")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "action.yml",
    ROOT / ".pre-commit-hooks.yaml",
]
FROM_AN_INDEX = re.compile(r"""pip install (?:-\S+ )*["'`]?memplan(?! @)\b""")


def test_memplan_is_installed_from_where_it_is():
    assert [path for path in TEXTS if FROM_AN_INDEX.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("text", ["pip install memplan", "pip install -U 'memplan[torch]'", 'pip install "memplan==1"'])
def test_the_rule_sees_what_it_is_for(text):
    assert FROM_AN_INDEX.search(text)


def test_the_rule_lets_a_repository_pass():
    assert not FROM_AN_INDEX.search('pip install "memplan @ git+https://HOST/OWNER/memplan@REF"')
