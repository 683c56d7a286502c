"""The one way in: whatever memplan reads is opened here, within bounds, or refused in one line that names it.

A path may name anything: a pipe without a writer, a device without an end, a folder, a name that no
file can have. Nothing but a regular file is opened, and no more of it is read than its kind can need.
"""

import errno
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, Literal

from memplan.errors import InvalidFileError, printable

MAXIMUM_TEXT_BYTES = 4 * 2**20
"""Configs, catalogs, budgets, records: the largest that ships has a tenth of it."""

MAXIMUM_ENTRIES = 100_000
"""Files and folders below a folder that is searched; a wrong folder, such as /, has more."""

STANDARD_INPUT = "-"

Kind = Literal["file", "folder", "pipe", "socket", "device", "nothing"]

_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a ZIP archive, such as a PyTorch checkpoint (.pt, .pth, .bin), which memplan never loads"),
    *(
        (bytes((0x80, protocol)), "a pickle, such as a PyTorch checkpoint, which memplan never loads")
        for protocol in range(2, 6)
    ),
    (b"GGUF", "a GGUF file, whose name has to end in .gguf"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
)
"""First bytes of files that people give where text is read.

Source:
    PKWARE APPNOTE.TXT 4.3.7; the opcode PROTO in Lib/pickletools.py; docs/gguf.md of ggml; HDF5 file
    format 3.0, II.A; RFC 1952, 2.3.1; RFC 8878, 3.1.1.
"""


def shown_path(path: Path) -> str:
    """Return a path fit for one line of a message; standard input by its usual name."""
    return "<stdin>" if is_standard_input(path) else printable(str(path), 300)


def is_standard_input(path: Path) -> bool:
    """Tell whether ``path`` is ``-``."""
    return str(path) == STANDARD_INPUT


def usable_path(text: str | Path) -> Path:
    """Return the path that a text names, with ``~`` filled in.

    Raises:
        InvalidFileError: No file can have such a name, such as an empty one, or there is no home folder.
    """
    if text == "":  # which would be the folder that this runs in
        raise InvalidFileError(["'': not a usable path: it is empty"])
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidFileError([f"'{printable(str(text))}': not a usable path: {error}"]) from None


def whole_path(path: Path) -> Path:
    """Return a path from the root on.

    Raises:
        InvalidFileError: The working folder, which it begins at, has been removed.
    """
    try:
        return path.absolute()
    except FileNotFoundError:
        raise InvalidFileError(["the working directory has been removed"]) from None


def path_kind(path: Path) -> Kind:
    """Return what lies at a path, links followed, without opening it.

    Raises:
        InvalidFileError: No file can have such a name, or a folder on the way cannot be searched.
    """
    try:
        str(path).encode()
        mode = stat.S_IFMT(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in _ABSENT:
            return "nothing"
        raise InvalidFileError([f"'{shown_path(path)}': not a usable path: {error.strerror}"]) from None
    except UnicodeEncodeError:
        raise InvalidFileError([f"'{shown_path(path)}': not a usable path: its name is not UTF-8"]) from None
    except ValueError as error:
        raise InvalidFileError([f"'{shown_path(path)}': not a usable path: {error}"]) from None
    return _KINDS.get(mode, "device")


def is_file(path: Path) -> bool:
    """Tell whether a regular file lies at a path."""
    return path_kind(path) == "file"


def is_folder(path: Path) -> bool:
    """Tell whether a folder lies at a path."""
    return path_kind(path) == "folder"


def require_folder_of(path: Path, option: str = "") -> None:
    """Refuse a path that is to be written to and whose folder is not there, or that is a folder.

    Args:
        option: Where it was given, followed by a space.

    Raises:
        InvalidFileError: No folder lies there, or none can; or one lies at the path itself, or no file can.
    """
    if not is_folder(path.parent):
        raise InvalidFileError([f"{option}{shown_path(path)}: there is no folder {shown_path(path.parent)}"])
    if is_folder(path):
        raise InvalidFileError([f"{option}{shown_path(path)}: is a directory"])


def files_in(folder: Path, pattern: str, deep: bool = False) -> list[Path]:
    """Return the regular files in a folder whose names match, sorted; with ``deep`` those in its folders too.

    Raises:
        InvalidFileError: The folder cannot be listed, or holds more than any that memplan is meant to read.
    """
    matching, waiting, count = list[str](), [os.fspath(folder)], 0
    while waiting:
        root = waiting.pop()
        for entry in (entries := _listing(root)):
            if entry.is_dir(follow_symlinks=False):
                waiting += [entry.path] if deep else []
            elif fnmatch(entry.name, pattern) and _is_regular(entry):
                matching.append(entry.path)
        count += len(entries)
        if count > MAXIMUM_ENTRIES:
            raise InvalidFileError([f"{shown_path(folder)}: more than {MAXIMUM_ENTRIES:,} files: name a folder below"])
    return [Path(path) for path in sorted(matching, key=lambda path: path.split(os.sep))]


def _listing(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [*entries]
    except OSError as error:
        raise InvalidFileError([f"{shown_path(Path(folder))}: cannot be listed: {error.strerror}"]) from None


def _is_regular(entry: os.DirEntry[str]) -> bool:
    """Tell whether a listed entry is a regular file, links followed; most listings say so themselves."""
    return (entry.name.isascii() and entry.is_file(follow_symlinks=False)) or is_file(Path(entry.path))


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading bytes; what goes wrong while it is read is refused alike.

    Raises:
        InvalidFileError: Missing, no regular file, or unreadable.
    """
    require_file(path)
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidFileError([f"{shown_path(path)}: is no longer a regular file"])
            if not status.st_size:  # one of the kernel's may have nothing to say yet
                if file.raw.read(1) is None:
                    raise InvalidFileError([f"{shown_path(path)}: cannot be read: it has no data yet"])
                file.seek(0)
            yield file
    except OSError as error:
        raise InvalidFileError([f"{shown_path(path)}: cannot be read: {error.strerror or error}"]) from None


def _without_waiting(path: str, flags: int) -> int:
    """Open without waiting for a writer, should a pipe have taken the file's place since it was looked at."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_file(path: Path) -> None:
    """Refuse a path at which no regular file lies.

    Raises:
        InvalidFileError: With what lies there instead.
    """
    kind = path_kind(path)
    if kind != "file":
        reasons = {"nothing": "no such file", "folder": "is a directory"}
        raise InvalidFileError([f"{shown_path(path)}: {reasons.get(kind, f'is a {kind}, not a regular file')}"])


@contextmanager
def mapped(path: Path, signature: bytes, name: str) -> Iterator[mmap.mmap]:
    """Map a file that begins with ``signature`` into memory, so that only what is looked at is read.

    Raises:
        InvalidFileError: As of :func:`opened`, or it begins with other bytes.
    """
    with opened(path) as file:
        start = file.read(len(signature))
        if start != signature:
            raise InvalidFileError(
                [f"{shown_path(path)}: not a {name} file: it begins with {start!r}, not {signature!r}"]
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def read_bytes(
    path: Path,
    maximum_bytes: int = MAXIMUM_TEXT_BYTES,
    instead: str = "give a text file",
    suggestion: str = "no file of this kind is",
) -> bytes:
    """Return the bytes of a text file of bounded size; ``-`` is standard input.

    Args:
        instead: What to give in place of a file that is no text.
        suggestion: What a message says of a larger file.

    Raises:
        InvalidFileError: Missing, unreadable, too large, or of a known kind that is no text.
    """
    if is_standard_input(path):
        raw = _standard_input(maximum_bytes + 1)
    else:
        with opened(path) as file:
            raw = file.read(maximum_bytes + 1)
    if kind := _kind_of_bytes(raw):
        raise InvalidFileError([f"{shown_path(path)}: {kind}; {instead}"])
    if len(raw) > maximum_bytes:
        raise InvalidFileError([f"{shown_path(path)}: larger than {maximum_bytes / 2**20:g} MiB: {suggestion}"])
    return raw


def _standard_input(count: int) -> bytes:
    try:
        if sys.stdin is None or sys.stdin.closed:
            raise InvalidFileError(["<stdin>: standard input is closed"])
        return sys.stdin.buffer.read(count)
    except OSError as error:
        raise InvalidFileError([f"<stdin>: cannot be read: {error.strerror or error}"]) from None


def read_text(
    path: Path,
    maximum_bytes: int = MAXIMUM_TEXT_BYTES,
    instead: str = "give a text file",
    suggestion: str = "no file of this kind is",
) -> str:
    """Return the text of a file, as :func:`read_bytes` has it.

    Raises:
        InvalidFileError: As there, or not UTF-8.
    """
    raw = read_bytes(path, maximum_bytes, instead, suggestion)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidFileError([f"{shown_path(path)}: not UTF-8 text (byte {error.start}); {instead}"]) from None


def read_own_text(path: Path) -> str:
    """Return the text of one of our own files, of which a name may need hundreds; one that is amiss is refused as any is.

    Raises:
        InvalidFileError: As :func:`read_text` raises it.
    """
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return read_text(path)


def _kind_of_bytes(raw: bytes) -> str:
    """Return what a file is that begins so, in words, or nothing where it may be text."""
    if raw[8:10] == b'{"' and int.from_bytes(raw[:8], "little") < 2**32:
        return "a safetensors file, whose name has to end in .safetensors"
    return next((kind for start, kind in _SIGNATURES if raw.startswith(start)), "")
