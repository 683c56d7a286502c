"""What hostile values in a valid file are not: whole files made to hurt, what else may lie at a path, keys of every trainer,
variables of the environment, and requests to the page. All choices are drawn from a ``Random``."""

import asyncio
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from memplan.catalog.catalog import data_directory
from tests.jobs import yaml_data

from .arguments import MODELS, NUMBERS
from .hostile import KEYS, VALUES, some_text, value

Bomb = Callable[[int], bytes]


def _aliases(size: int) -> bytes:
    rows = (f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" for n in range(1, size % 40 + 2))
    return "\n".join(["k0: &k0 [x]", *rows]).encode()


def _merges(size: int) -> bytes:
    rows = (f"k{n}: &k{n} {{<<: [*k{n - 1}, *k0], y{n}: 1}}" for n in range(1, size % 3000))
    return "\n".join(["k0: &k0 {x: 1}", *rows]).encode()


def _sized(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length % 2**64) + header


def _gguf(*numbers: tuple[int, int]) -> bytes:
    return b"GGUF" + b"".join((number % 2 ** (8 * width)).to_bytes(width, "little") for number, width in numbers)


BOMBS: Mapping[str, Bomb] = {
    "aliases": _aliases,
    "merges": _merges,
    "anchors": lambda n: b"".join(b"a%d: &a%d 1\n" % (k, k) for k in range(n % 30_000)),
    "dashes": lambda n: b"- " * n + b"1",
    "block": lambda n: b"".join(b" " * k + b"a:\n" for k in range(n % 1500)),
    "questions": lambda n: b"? " * n + b"a",
    "documents": lambda n: b"---\n" * n,
    "sixties": lambda n: b"a: 1" + b":59" * n,
    "digits": lambda n: b"a: " + b"9" * n,
    "underlined": lambda n: b"a = 1" + b"_0" * n,
    "hexadecimal": lambda n: b"a = 0x" + b"f" * n,
    "a long line": lambda n: b"a: " + b"x" * (40 * n),
    "a long key": lambda n: b"x" * (40 * n) + b": 1",
    "returns": lambda n: b"a: 1\r" * n,
    "lines": lambda n: b"\n" * (40 * n),
    "spaces": lambda n: b" " * (40 * n) + b"a",
    "tabs": lambda n: b"\t" * n + b"a: 1",
    "nothing": lambda n: bytes(n),
    "UTF-16": lambda n: "a: 1\n".encode("utf-16") * (n % 100 + 1),
    "a mark": lambda n: b"\xef\xbb\xbf" * (n % 3 + 1) + b"a: 1\n",
    "surrogates": lambda n: b'{"a": "' + b"\\ud800" * n + b'"}',
    "brackets": lambda n: b"[" * n + b"]" * n,
    "braces": lambda n: b'{"a":' * n + b"1" + b"}" * n,
    "a list": lambda n: b"[" + b",".join([b"1"] * n) + b"]",
    "repeated keys": lambda n: b"{" + b",".join([b'"a":1'] * (n % 20_000 + 1)) + b"}",
    "dotted": lambda n: b"a." * n + b"b = 1",
    "arrays": lambda n: b"a = " + b"[" * (n % 200) + b"]" * (n % 200),
    "tables": lambda n: b"".join(b"[a%d]\n" % k for k in range(n % 30_000)),
    "arrays of tables": lambda n: b"[[a]]\n" * n,
    "parentheses": lambda n: b"x = " + b"(" * n + b")" * n,
    "sums": lambda n: b"x = 1" + b"+1" * n,
    "products": lambda n: b"f(a=1" + b"*1000000" * (n % 4000) + b")",
    "doubling": lambda n: b"a0 = 1\n" + b"".join(b"a%d = a%d + a%d\n" % (k + 1, k, k) for k in range(n % 3000)),
    "attributes": lambda n: b"x" + b".a" * n + b"(a=1)",
    "added attributes": lambda n: b"x += a" + b".b" * n,
    "a loop over attributes": lambda n: b"for x in a" + b".b" * n + b":\n    pass",
    "hexadecimal words": lambda n: b"SFTConfig(max_length=0x" + b"f" * n + b")",
    "hexadecimal keys": lambda n: b"[training]\nlocal_batch_size = 0x" + b"f" * n,
    "a day": lambda n: b"[training]\nlocal_batch_size = 1979-05-27\nseq_len = 07:32:00\n" * (n % 2 + 1),
    "calls": lambda n: b"f" + b"(a=1)" * (n % 2000),
    "signs": lambda n: b"x = " + b"-" * n + b"1",
    "powers": lambda n: b"x = 9" + b"**9" * (n % 50),
    "warnings": lambda n: b"x = '\\d' if 1 is 1else 0x1for x in y\n" * (n % 100 + 1),
    "a coding": lambda n: b"# -*- coding: %s -*-\nx = 1" % (b"utf-7", b"rot13", b"idna", b"undefined")[n % 4],
    "strange keywords": lambda n: b"f(a={None: 1, (1, 2): 2}, b=b'\\xff', c=1j, d=..., e={1}, f=1e999)" * (n % 9 + 1),
    "expressions": lambda n: b"$((999999999*999999999)) $(expr 1 " * n,
    "messages": lambda n: b"CUDA out of memory. Tried to allocate 2.00 GiB. " * n,
    "a message of digits": lambda n: b"CUDA out of memory. Tried to allocate " + b"9" * n + b" GiB.",
    "progress": lambda n: b"1/2 [0" * n,
    "cells": lambda n: b'{"cells": [' + b",".join([b'{"cell_type": "code", "source": "x=1"}'] * n) + b"]}",
    "lying header": lambda n: _sized(b"{}", (2**63, n, -1, 100_000_000)[n % 4]),
    "lying shape": lambda n: _sized(b'{"a":{"dtype":"F32","shape":[%s1],"data_offsets":[0,9]}}' % (b"9999999999," * (n % 99))),
    "a deep header": lambda n: _sized(b'{"a":' * n),
    "lying counts": lambda n: _gguf((3, 4), (n, 8), (-1, 8)),
    "a lying string": lambda n: _gguf((3, 4), (0, 8), (1, 8), (2**40 + n, 8)),
    "a lying array": lambda n: _gguf((3, 4), (0, 8), (1, 8), (1, 8), (97, 1), (9, 4), (n % 14, 4), (2**60 - n, 8)),
    "arrays in arrays": lambda n: _gguf((3, 4), (0, 8), (1, 8), (1, 8), (97, 1), *((9, 4), (1, 8)) * (n % 5000), (9, 4)),
}  # fmt: skip
"""Whole files: what they are, and their bytes for a size; each grows with it, most to some hundred kilobytes."""

SIZES = (0, 1, 60, 250, 900, 1100, 2500, 4301, 20_000, 50_000)


def bomb(random: Random) -> bytes:
    """Return a whole file that is made to hurt."""
    return BOMBS[random.choice(sorted(BOMBS))](random.choice(SIZES))


# ------------------------------------------------------------------ what else may lie at a path
def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


PLACES: Mapping[str, Callable[[Path], object]] = {
    "a loop": _loop,
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a sparse file": _sparse,
    "an empty file": lambda path: path.touch(),
    "nothing": lambda path: None,
    **{
        target: (lambda path, target=target: path.symlink_to(target))  # type: ignore[misc]
        for target in ("/nonexistent/x", "/dev/zero", "/dev/full", "/dev/tty", "/proc/kmsg", "/proc/self/mem", "/proc", "/", "..")
    },
}  # fmt: skip
"""What lies there, and what puts it there."""


def put_instead(random: Random, path: Path) -> str:
    """Put something else in the place of a file; return what."""
    cleared(path)
    what = random.choice(sorted(PLACES))
    PLACES[what](path)
    return what


def cleared(path: Path) -> None:
    """Take away what lies at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------ trainers' keys
@cache
def trainer_keys() -> tuple[str, ...]:
    """Return every key that some trainer's mapping reads."""
    files = sorted((data_directory() / "configs" / "trainers").glob("*.yaml"))
    return tuple(sorted({key for file in files for key in _keys(yaml_data(file)["rules"])}))


def _keys(rules: list[Mapping[str, Any]]) -> Iterator[str]:
    for rule in rules:
        own = rule.get("key", ())
        yield from (own,) if isinstance(own, str) else own
        for condition in (rule.get("when"), rule.get("unless")):
            yield from condition if isinstance(condition, Mapping) else ()


def with_trainer_keys(random: Random, data: Any) -> Any:
    """Return a trainer's keys with one to three of those that some trainer's mapping reads set to anything."""
    changed = dict(data)
    for _ in range(random.randint(1, 3)):
        *around, last = random.choice(trainer_keys()).split(".")
        part = changed
        for name in around:
            inner = part.get(name)
            part[name] = part = dict(inner) if isinstance(inner, Mapping) else {}
        part[last] = random.choice((value(random), random.choice(VALUES), random.choice(NUMBERS)))
    return changed


# ------------------------------------------------------------------ the environment
PATHS = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME", "GITHUB_STEP_SUMMARY", "TMPDIR")
WORDS = (
    "LC_ALL", "LANG", "TERM", "NO_COLOR", "COLUMNS", "LINES", "PYTORCH_CUDA_ALLOC_CONF", "HF_ENDPOINT", "CI", "FORCE_COLOR",
    "_MEMPLAN_COMPLETE", "_TYPER_COMPLETE_ARGS", "_TYPER_COMPLETE_FISH_ACTION", "COMP_WORDS", "COMP_CWORD",
)  # fmt: skip
LINES = (
    "",
    "0",
    "-1",
    "nan",
    "9" * 30,
    "C",
    "dumb",
    "tr_TR.ISO-8859-9",
    "\x1b[31m",
    "\u2028",
    "\udcff",
    "x" * 5000,
    "complete_bash",
    "a=b:c,d",
)
FOLDERS = (
    "",
    ".",
    "..",
    "/nonexistent",
    "/dev/null",
    "/proc/self",
    "~nobody/x",
    "~",
    "x" * 300,
    "\n",
    "\udcff",
    "x" * 5000,
)


def variables(random: Random) -> dict[str, str]:
    """Return variables of the environment, mostly none."""
    if random.randrange(3):
        return {}
    names = random.sample((*PATHS, *WORDS), random.randint(1, 3))
    return {name: random.choice(FOLDERS if name in PATHS else LINES) for name in names}


# ------------------------------------------------------------------ the page
TOKEN = "the-token"
FIELDS = {
    "model": MODELS, "gpu": ("t4", "h100", "LOCAL"), "config": ("lora", "tier1", "x.yaml"), "gpus": NUMBERS, "batch": NUMBERS,
    "length": ("128", *NUMBERS), "stack": ("trl", "axolotl", "x"), "checkpointing": ("full", "Full"), "precision": ("fp16", "fp8"),
}  # fmt: skip


def request(random: Random) -> dict[str, Any]:
    """Return a request as servers hand it on: most often a question of the page's."""
    names = random.sample(sorted(FIELDS), random.randrange(5))
    pairs = [(name, random.choice(FIELDS[name])) for name in names]
    pairs += [("token", TOKEN)] if random.randrange(4) else []
    pairs += [(random.choice(KEYS), some_text(random))] if not random.randrange(4) else []
    query = "&".join(f"{quote(key, errors='replace')}={quote(text, errors='replace')}" for key, text in pairs)
    if not random.randrange(8):
        query += random.choice(
            ("&", "&&=", "%", "%ff%fe", "&a", "&" * 1000, "x" * 5000, "\x00", "&model=gpt2&model=t4")
        )
    hosts = ("127.0.0.1:1", "localhost", "[::1]:9", "evil.example", "", ":", "127.0.0.1.evil", "\xff", "x" * 3000)
    paths = ("/", "/quick", "/controls.js", "/..", "/%2e%2e/etc/passwd", "//quick", "", "/quick/", some_text(random))
    tokens = (TOKEN, TOKEN, TOKEN, "", "\xff", "x" * 3000)
    headers = [
        ("host", random.choice(hosts[:2] if random.randrange(4) else hosts)),
        ("x-memplan-token", random.choice(tokens)),
    ]
    path = random.choice(paths[:2] if random.randrange(2) else paths)
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": "",
        "method": random.choice(("GET", "GET", "GET", "HEAD", "POST", "X" * 50)), "path": path,
        "raw_path": quote(path, errors="replace").encode(), "query_string": query.encode("latin-1", "replace"),
        "headers": [(name.encode(), text.encode("latin-1", "replace")) for name, text in headers],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip


def answered(scope: Mapping[str, Any]) -> tuple[int, bytes]:
    """Return the status and the body with which the page's server answers a request."""
    from memplan.cli.ui.application import application

    sent: list[Mapping[str, Any]] = []

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(application(TOKEN)(dict(scope), receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)
