"""The glossary is short enough to be read, and defines each term once."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
MOST_TERMS = 40


def test_the_glossary_has_at_most_forty_terms_each_once() -> None:
    text = PAGE.read_text()
    glossary = text.partition("## Glossary")[2].partition("## Style")[0]
    terms = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[1:]
    assert 30 < len(terms) <= MOST_TERMS
    assert len(set(terms)) == len(terms)
