"""Damage to valid content: to its values and keys, its text, its bytes. All choices are drawn from a ``Random``."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

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


Edit = tuple[int, str, Any, str]
Damage = tuple[str, int, bytes]


def some_text(random: Random, longest: int = 8) -> str:
    """Return characters of every kind."""
    spans = ((32, 126), (0, 31), (127, 0x2FF), (0x2000, 0x206F), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
    chosen = [
        spans[min(random.randrange(12), 5) if random.randrange(2) else 0] for _ in range(random.randrange(longest + 1))
    ]
    return "".join(chr(random.randint(*span)) for span in chosen)


def value(random: Random, depth: int = 0) -> Any:
    """Return a value of JSON, most often one of those that hurt."""
    kind = random.randrange(10)
    if kind < 5 or depth > 2:
        return random.choice(VALUES)
    if kind < 7:
        return f"{_MARK}{random.randrange(len(TOKENS))}{_MARK}"
    if kind == 7:
        return random.choice((random.randint(-(2**70), 2**70), random.uniform(-1e9, 1e9), some_text(random)))
    inner = [value(random, depth + 1) for _ in range(random.randrange(4))]
    return inner if kind == 8 else {some_text(random, 3): item for item in inner}


def edits(random: Random) -> list[Edit]:
    """Return edits: where, what is done there, with which value, under which key."""
    kinds = (
        "replace", "replace", "replace", "delete", "rename", "wrap", "text", "negate", "scale", "add", "swap",
        "case",
    )  # fmt: skip
    return [
        (
            random.randrange(2**16),
            random.choice(kinds),
            value(random),
            random.choice((random.choice(KEYS), some_text(random, 5))),
        )
        for _ in range(random.randint(1, 3))
    ]


def edited(data: Any, steps: list[Edit]) -> Any:
    """Return a copy of ``data`` after the edits."""
    data = {"": copy.deepcopy(data)}
    for place, kind, new, key in steps:
        places = list(_places(data)) or [(data, "")]
        data.setdefault("", None)
        parent, name = places[place % len(places)]
        _edit(parent, name, kind, copy.deepcopy(new), key, places)
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


def damages(random: Random) -> list[Damage]:
    """Return damages: of which kind, where, and with what."""
    kinds = ("flip", "flip", "cut", "insert", "overwrite", "repeat", "word")
    tokens = [token.encode("utf-8", "surrogatepass") for token in TOKENS if token]
    return [
        (
            random.choice(kinds),
            random.randrange(2**20),
            random.choice((random.choice(tokens), bytes([random.randrange(256)]))),
        )
        for _ in range(random.randint(1, 4))
    ]


def damaged(raw: bytes, steps: list[Damage]) -> bytes:
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
