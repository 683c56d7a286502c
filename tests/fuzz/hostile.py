"""Strategies that damage valid content: its values and keys, its text, its bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

TOKENS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1" * 41, "1e400000", ".nan", ".inf",
    "[" * 3000, "[" * 50 + "]" * 50, '{"a":' * 3000, '{"a":' * 90 + "1" + "}" * 90, '"\\ud800"', '"\\u0000"',
    "*a", "&a [*a]", "&b [1, 2, *b, *b]", "!!python/object/apply:os.system ['true']", "!!binary aGVsbG8=",
    "2026-01-01", "0x10", "017", "1_000", "12:30:45", "~", "yes", "off", '"\\u202e"', '"\\u001b[31m"', "'a\\nb'", "",
    "<<", "? x", "- y", "# z", "%YAML 9.9", "---", "...", "\t", "\x00", "\ufeff", "\u2028", "\ud7ff",
)  # fmt: skip
"""Texts put in the place of a value: JSON and YAML that no writer of ours makes."""

KEYS = (
    "Kernels", "NONE", "none", "str", "int", "bool", "constrained-str", "literal['a']", "dict[str,str]", "function-x",
    "tuple[x]", "[key]", "", " ", ".", "a.b", "__class__", "self", "0", "-1", "x" * 300, "\x1b[31m", "\u202e", "\n",
    "\u2028", "ключ", "ﬀ", "\x00", "=", "default", "schema", "name", "model_type", "<<", "\udc80",
)  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 255, 2**31, 2**53, 2**63, 2**64, 10**30, 10**39, -(10**30), 0.5, -0.5, 1e300,
    1e-300, "", " ", "x", "1", "nan", "true", "x" * 5000, "\x1b[31m", "\n", "a\nb", "\u2028", "\u202e", "\x00",
    "../../etc/passwd", "/dev/zero", "-", "~", "%s", "{}", "1 GiB", "1e5 GiB", "50%", "bf16", "muon", "gpt2", "llama",
    [], {}, [[]], [{}], {"": ""}, [None], [1] * 100, [0, 0], ["x", "x"], {"Key": 1}, {"default": None}, {"a": {"b": {}}},
    [[[[[[[[[[]]]]]]]]]],
)  # fmt: skip

_MARK = "\ue000"


def values() -> st.SearchStrategy[Any]:
    """Values of JSON, most of them from a list of those that hurt."""
    anything = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    )
    tokens = st.sampled_from(range(len(TOKENS))).map(lambda index: f"{_MARK}{index}{_MARK}")
    return st.sampled_from(VALUES) | tokens | anything


def edits() -> st.SearchStrategy[list[tuple[int, str, Any, str]]]:
    """Lists of edits: where, what is done there, with which value, under which key."""
    kinds = (
        "replace",
        "replace",
        "replace",
        "delete",
        "rename",
        "wrap",
        "text",
        "negate",
        "scale",
        "add",
        "swap",
        "case",
    )
    keys = st.sampled_from(KEYS) | st.text(max_size=5)
    return st.lists(st.tuples(st.integers(0, 2**16), st.sampled_from(kinds), values(), keys), min_size=1, max_size=3)


def edited(data: Any, steps: list[tuple[int, str, Any, str]]) -> Any:
    """Return a copy of ``data`` after the edits."""
    data = {"": copy.deepcopy(data)}
    for place, kind, value, key in steps:
        places = list(_places(data)) or [(data, "")]
        data.setdefault("", None)
        parent, name = places[place % len(places)]
        _edit(parent, name, kind, copy.deepcopy(value), key, places)
    return data.get("", data)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with every key in it."""
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        yield data, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _edit(parent: Any, name: Any, kind: str, value: Any, key: str, places: list[tuple[Any, Any]]) -> None:
    old = parent.get(name) if isinstance(parent, dict) else parent[name]
    number = isinstance(old, int | float) and not isinstance(old, bool)
    if kind == "delete":
        parent.pop(name)
    elif kind in ("rename", "case") and isinstance(parent, dict):
        parent[key if kind == "rename" else str(name).capitalize()] = parent.pop(name)
    elif kind == "add" and isinstance(old, dict):
        old[key] = value
    elif kind == "wrap":
        parent[name] = [old]
    elif kind == "text":
        parent[name] = str(old)
    elif kind == "negate" and number:
        parent[name] = -old
    elif kind == "scale" and number:
        parent[name] = old * 10**9
    elif kind == "swap":
        other, there = places[len(str(value)) % len(places)]
        parent[name] = (
            copy.deepcopy(other[there]) if there in other or (isinstance(other, list) and there < len(other)) else value
        )
    else:
        parent[name] = value


def serialised(data: Any) -> bytes:
    """Return JSON, with the hostile tokens in place of the marks that stand for them."""
    text = json.dumps(data, ensure_ascii=True)
    mark = json.dumps(_MARK)[1:-1]
    for index, token in enumerate(TOKENS):
        text = text.replace(f'"{mark}{index}{mark}"', token)
    return text.encode("utf-8", "surrogatepass")


def damages() -> st.SearchStrategy[list[tuple[str, int, bytes]]]:
    """Lists of damages: of which kind, where, and with what."""
    kinds = ("flip", "flip", "cut", "insert", "overwrite", "repeat", "word")
    payload = st.binary(min_size=1, max_size=8) | st.sampled_from(
        [t.encode("utf-8", "surrogatepass") for t in TOKENS if t]
    )
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 2**20), payload), min_size=1, max_size=4)


def damaged(raw: bytes, steps: list[tuple[str, int, bytes]]) -> bytes:
    """Return ``raw`` after the damages."""
    for kind, place, payload in steps:
        at = place % (len(raw) + 1)
        if kind == "cut":
            raw = raw[:at]
        elif kind == "insert":
            raw = raw[:at] + payload + raw[at:]
        elif kind == "overwrite":
            raw = raw[:at] + payload + raw[at + len(payload) :]
        elif kind == "repeat":
            raw = raw[:at] + raw[at : at + 40] * (1 + payload[0]) + raw[at + 40 :]
        elif kind == "word":
            number = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, place)[payload[0] % 7]
            raw = raw[:at] + number.to_bytes(8, "little") + raw[at + 8 :]
        elif at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ (payload[0] or 1)]) + raw[at + 1 :]
    return raw
