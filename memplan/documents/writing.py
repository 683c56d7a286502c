"""The one writer: whatever memplan prints or saves is written whole, or an error says why not."""

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, TextIO

from memplan.documents.escaping import encoded, escaped_lines
from memplan.errors import LONGEST_PROBLEM, InvalidFileError, printable


# ------------------------------------------------------------------ standard output and standard error
class _Stream(io.TextIOBase):
    """A standard stream as everyone else sees it: what is written to it is escaped, and there at once."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO | None, put: Callable[[TextIO | None, str], None]) -> None:
        self._stream, self._put = stream, put
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write a text that other code prints, line by line as it is."""
        self._put(self._stream, escaped_lines(text))
        return len(text)

    def put(self, text: str) -> None:
        """Write a text that is escaped already."""
        self._put(self._stream, text)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor, where there is one."""
        return super().fileno() if self._stream is None else self._stream.fileno()

    def writable(self) -> bool:
        """Return True, also for a closed stream: that it is closed is told when something is written."""
        return True


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Send everything that is printed meanwhile through this module, and keep 0, 1 and 2 from becoming files."""
    with contextlib.ExitStack() as stack:
        for wanted in range(3):
            with contextlib.suppress(OSError):
                if (got := os.open(os.devnull, os.O_RDWR)) != wanted:  # the lowest that is free
                    os.close(got)
        stack.enter_context(contextlib.redirect_stdout(_Stream(sys.stdout, _put_answer)))
        stack.enter_context(contextlib.redirect_stderr(_Stream(sys.stderr, _put_remark)))
        yield


def write_answer(text: str) -> None:
    """Write an escaped text to standard output.

    A reader that stopped early has what it wanted: the answer, and so the exit code, stays what it was.

    Raises:
        InvalidFileError: It could not be written whole.
    """
    if isinstance(sys.stdout, _Stream):
        sys.stdout.put(text)
    else:
        _put_answer(sys.stdout, text)


def say(text: str) -> None:
    """Write a remark besides the answer, on a line of standard error."""
    write_remark(f"memplan: {printable(text, LONGEST_PROBLEM)}\n")


def write_remark(text: str) -> None:
    """Write an escaped text to standard error; where that is closed or full, the text is dropped."""
    if isinstance(sys.stderr, _Stream):
        sys.stderr.put(text)
    else:
        _put_remark(sys.stderr, text)


def _put_answer(stream: TextIO | None, text: str) -> None:
    try:
        _put(stream, text)
    except BrokenPipeError:
        return
    except OSError as error:
        raise InvalidFileError([f"standard output: cannot be written: {error.strerror or error}"]) from None


def _put_remark(stream: TextIO | None, text: str) -> None:
    with contextlib.suppress(OSError):
        _put(stream, text)


def _put(stream: TextIO | None, text: str) -> None:
    """Write a text past all buffers: they would write the rest again at the end, or, switched off, leave it out."""
    if stream is None or stream.closed:
        raise OSError(errno.EBADF, "it is closed")
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
        return
    _write_all(getattr(buffer, "raw", buffer), encoded(text, stream.encoding or "utf-8"))


def _write_all(raw: Any, data: bytes) -> None:
    """Write all bytes; one call may take fewer of them, or none where a pipe is full and does not wait."""
    left = memoryview(data)
    while left:
        written = raw.write(left)
        if written is None:
            from select import select

            select([], [raw], [])
        else:
            left = left[written:]


# ------------------------------------------------------------------ files
def write_file(path: Path, content: str | bytes) -> None:
    """Write a file so that at every moment either the old one or the new one is there, whole.

    Raises:
        InvalidFileError: It cannot be written; what was there is left as it was.
    """
    with _refused_as_input(path), replacing(path) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def append_file(path: Path, text: str) -> None:
    """Append to a file, all of the text or nothing.

    Raises:
        InvalidFileError: It cannot be written; what was there is left as it was.
    """
    with _refused_as_input(path), _opened(path, "ab") as file:
        before = file.tell() if file.seekable() else 0
        try:
            file.write(text.encode())
            file.flush()
        except BaseException:
            if file.seekable():
                os.ftruncate(file.fileno(), before)
            raise


def make_folder(path: Path) -> None:
    """Make a folder, and those that it lies in.

    Raises:
        InvalidFileError: It cannot be made.
    """
    with _refused_as_input(path, "made"):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def _refused_as_input(path: Path, done: str = "written") -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidFileError([f"{path}: cannot be {done}: {getattr(error, 'strerror', None) or error}"]) from None


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write to, which takes the place of ``path`` when all of it is on the disk, and never before.

    It keeps the rights of the file that it replaces. Through a link, what the link leads to is replaced; a
    device or a pipe is no file to be replaced, and is written to.

    Raises:
        OSError: Something cannot be written; what was there is left as it was.
    """
    before = _status(path)
    if before is not None and not stat.S_ISREG(before.st_mode):
        with _opened(path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".memplan-{os.urandom(8).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "wb") as file:
            if before is not None:
                _give_rights(temporary, before)
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _opened(path: Path, mode: Literal["wb", "ab"]) -> IO[bytes]:
    """Return a file to write to as it is; a pipe that nobody reads from is refused, which would wait for a reader for ever."""
    if not path.is_fifo():
        return open(path, mode)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(error.errno, "nobody reads from this pipe") from None
    os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the present file, or None; a file that may not be written is refused, though it could be replaced."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return status


def _give_rights(path: Path, like: os.stat_result) -> None:
    if hasattr(os, "chown"):
        with contextlib.suppress(OSError):  # only root gives files away, and others own what they replace
            os.chown(path, like.st_uid, like.st_gid)
    os.chmod(path, stat.S_IMODE(like.st_mode))


def _sync_folder(folder: Path) -> None:
    """Make the new name last; not every system can, and the file is whole in any case."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
