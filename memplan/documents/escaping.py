"""The one escape: text from outside shown so that it is nothing but text, whatever it is printed as.

Names of files and folders, keys, descriptions and records are written by others. A terminal obeys control
characters in them, a code forge lines that begin with ``::``, a spreadsheet cells that begin with ``=``, a
browser tags, and XML cannot hold some characters at all.
"""

import json
import re
from typing import Any

from memplan.errors import character_code, escaped


def escaped_lines(text: str) -> str:
    """Return text with each of its lines escaped; the line breaks are the writer's own."""
    return "\n".join(map(escaped, text.split("\n")))


def escaped_json(text: str) -> str:
    r"""Return the same JSON, with nothing in it that a terminal or a build log would obey.

    What is escaped can only stand in strings, where JSON reads the escapes back as what they were.

    Example:
        >>> text = escaped_json(json.dumps("é\x9b", ensure_ascii=False))
        >>> print(text, json.loads(text) == "é\x9b")
        "é\u009b" True
    """
    return escaped_lines(text)


def json_text(data: Any, indent: int = 2) -> str:
    """Return data as JSON that ends in a line break; its strings are exact.

    Raises:
        ValueError: A number is not finite, which JSON cannot say.
    """
    return escaped_json(json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False)) + "\n"


def encoded(text: str, encoding: str) -> bytes:
    """Return text in an encoding; where that lacks a character, all that are not ASCII are written as JSON does."""
    try:
        return text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(one if one.isascii() else character_code(one) for one in text).encode(encoding)


# ------------------------------------------------------------------ besides, for each format
_FORMULA = "=+-@\uff1d\uff0b\uff0d\uff20"
"""What makes a cell a formula, also at full width.
Source: https://owasp.org/www-community/attacks/CSV_Injection
"""

_QUANTITY = re.compile(r"[-+]?\d[\d,]*(\.\d+)?([eE][-+]?\d+)?( ?([KMGTPE]?i?B|%))?|-")
"""A number with or without a unit of ours, and the dash that stands for nothing: no spreadsheet runs them."""


def csv_cell(text: str) -> str:
    """Return an escaped text as a cell that no spreadsheet takes for a formula.

    Example:
        >>> csv_cell("=1+1"), csv_cell("-1.5 GiB")
        ("'=1+1", '-1.5 GiB')
    """
    return f"'{text}" if text and text[0] in _FORMULA and not _QUANTITY.fullmatch(text) else text


_TAGS = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
_MARKS = _TAGS | {ord(mark): f"&#{ord(mark)};" for mark in "\\|`[]*~@"}
_EDGES = re.compile(r"(?<!\w)_|_(?!\w)|^\s*(?:#|[-=](?=[-=]+\s*$))")


def markdown(text: str) -> str:
    """Return an escaped text as Markdown that shows it: no tag, link, mention, emphasis, list or cell of its own.

    Example:
        >>> markdown("<b> a|b optimizer_states _x_")
        '&lt;b&gt; a&#124;b optimizer_states &#95;x&#95;'
    """
    return _EDGES.sub(lambda match: f"{match[0][:-1]}&#{ord(match[0][-1])};", text.translate(_MARKS))


def workflow_data(text: str) -> str:
    """Return the message of a workflow command; its own line breaks are kept.

    Source:
        packages/core/src/command.ts of https://github.com/actions/toolkit

    Example:
        >>> workflow_data("50 % of it: two" + chr(10) + "lines")
        '50 %25 of it: two%0Alines'
    """
    return escaped_lines(text).replace("%", "%25").replace("\n", "%0A")


def workflow_property(text: str) -> str:
    """Return a property of a workflow command: colons and commas would end it.

    Example:
        >>> workflow_property("a:b,c")
        'a%3Ab%2Cc'
    """
    return workflow_data(text).replace(":", "%3A").replace(",", "%2C")
