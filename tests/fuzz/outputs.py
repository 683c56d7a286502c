"""What hostile text may never do in an answer, whatever it is printed as."""

import csv
import io
import json
import re
from typing import Any
from xml.etree import ElementTree

ANNOTATION = re.compile(r"::(error|warning)( file=[^:,]*,line=[0-9]+)?::.*")
FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"
NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(\.[0-9]+)?(e[-+]?[0-9]+)?( ?([KMGTPE]?i?B|%))?|-")
TAGS = re.compile(r"</?(details|summary|table|tr|td)>|<!-- memplan:(check|diff) -->")


def strings(data: Any) -> list[str]:
    """Return every string in JSON, keys too."""
    if isinstance(data, dict):
        return [*data, *(text for value in data.values() for text in strings(value))]
    if isinstance(data, list):
        return [text for value in data for text in strings(value)]
    return [data] if isinstance(data, str) else []


def check_lines(text: str, annotations: bool = False) -> None:
    """Nothing that a terminal or a build log obeys, but annotations of memplan's own."""
    for line in text.split("\n"):
        assert line.isprintable(), line
        assert not re.search(r"##\w*\[", line), line
        if line.strip().startswith("::"):
            assert annotations, line
            assert ANNOTATION.fullmatch(line), line


def check_csv(text: str) -> None:
    """Tables of equal rows, and no cell that a spreadsheet runs."""
    for table in text.split("\n\n"):
        rows = list(csv.reader(io.StringIO(table), strict=True))
        assert len({len(row) for row in rows if row}) <= 1, table
        for cell in (cell for row in rows for cell in row):
            assert cell[:1] not in FORMULA or not cell or NUMBER.fullmatch(cell), cell


def check_markdown(text: str) -> None:
    """No tag, link or mention of somebody else's, and tables of equal rows."""
    rest = TAGS.sub("", text)
    assert not set("<`[]~@\\") & set(rest), rest
    columns = 0
    for line in text.split("\n"):
        columns = columns or line.count("|") if line.startswith("| ") else 0
        assert line.count("|") == columns, line


def check_output(form: str, text: str) -> None:
    """Check an answer that was given."""
    check_lines(text, annotations=form == "github")
    if form in ("json", "gitlab", "sarif"):
        json.loads(text)
    elif form == "csv":
        check_csv(text)
    elif form == "md":
        check_markdown(text)
    elif form in ("junit", "svg"):
        ElementTree.fromstring(text)
