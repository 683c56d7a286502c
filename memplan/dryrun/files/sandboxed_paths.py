"""Where the files of a script lie: what it writes, changes or moves goes to a folder that is thrown away, under the same names.

What it looks at is found there first, and then where it says, unless it has removed it. A link that it makes is followed by its name, so that
nothing is ever written through one to what is really there.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

_WRITES = frozenset("wax+")
_ANEW = frozenset("wx")
"""Of modes that write: those that begin an empty file."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_MOST_LINKS = 40
"""Links one behind another that Linux follows (path_resolution(7))."""


class SandboxedPaths:
    """The names of files, and where they lie.

    Args:
        scratch: The folder for what is written.
        free: Folders in which a script may write.
        skipped: Is told what is not written where the script says.
    """

    def __init__(self, scratch: str, free: Iterable[str], skipped: dict[str, int]) -> None:
        self._scratch, self._skipped = scratch, skipped
        self._free = tuple({os.path.realpath(path) for path in (scratch, *free)})
        self._removed = set[str]()  # What is there still, though the script has removed it
        self._links: dict[str, str] = {}  # What the script has made -> what it names
        self._folder = ""  # The current one, where it is the script's alone

    def replacements(self) -> dict[str, Any]:
        """Return what stands for the functions of ``os``."""
        looks = ("stat", "lstat", "statvfs", "access", "readlink", "listxattr", "getxattr")
        marks = ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
        return {
            "open": self._descriptor(os.open),
            "getcwd": lambda: self._folder or _FOLDER(),
            "getcwdb": lambda: os.fsencode(self._folder or _FOLDER()),
            "chdir": self._entered,
            "listdir": self._listed(os.listdir, lambda one: one),
            "scandir": self._listed(os.scandir, lambda one: one.name),
            "truncate": self._truncated,
            "link": self._linked,
            "symlink": self._named,
            **{name: self._looked(getattr(os, name)) for name in looks if hasattr(os, name)},
            **{name: self._marked(getattr(os, name)) for name in marks if hasattr(os, name)},
            **{name: self._changed(getattr(os, name)) for name in ("rmdir", "remove", "unlink")},
            **{name: self._made(getattr(os, name)) for name in ("mkdir", "mkfifo", "mknod")},
            **{name: self._moved(getattr(os, name)) for name in ("rename", "replace")},
        }

    def place(self, path: Any, mode: str = "r") -> Any:
        """Return where a file lies that is opened in a mode."""
        apart = self.apart(path)
        if apart is None:
            return path
        if not _WRITES & set(mode):
            return self._seen(path, apart)
        if not _ANEW & set(mode):
            self._copied(path, apart)
        return self.written(path, apart)

    def apart(self, path: Any, *, follows: bool = True) -> str | None:
        """Return where a file lies that the script writes, or nothing where it may write.

        Args:
            follows: Whether the file is what a link of that name names, and not the link.
        """
        if isinstance(path, int):
            return None
        whole = self._whole(path, follows=follows)
        if whole.startswith(tuple(f"{free}{os.sep}" for free in self._free)) or whole in self._free:
            return None
        return os.path.join(self._scratch, whole.lstrip(os.sep))

    def written(self, path: Any, apart: str) -> str:
        """Return where a file goes that the script writes; the folder for it is made."""
        self._skipped.setdefault(os.fsdecode(path), 0)
        self._removed.discard(_named_by(apart, self._scratch))
        make_folders(os.path.dirname(apart))
        return apart

    def _whole(self, path: Any, *, follows: bool) -> str:
        whole = os.path.abspath(os.fsdecode(path))
        for _ in range(_MOST_LINKS):
            links = (one for one in self._links if whole.startswith(f"{one}{os.sep}") or (follows and whole == one))
            link = next(links, None)
            if link is None:
                return whole
            whole = os.path.normpath(os.path.join(os.path.dirname(link), self._links[link]) + whole[len(link) :])
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def _seen(self, path: Any, apart: str | None) -> Any:
        """Return where a file lies that the script looks at: among what it has written, or where it says, unless it has removed it."""
        if apart is None:
            return path
        named = _named_by(apart, self._scratch)
        if _exists(apart) or named in self._removed:
            return os.fsencode(apart) if isinstance(path, bytes) else apart
        return named if self._folder or self._links else path

    def _copied(self, path: Any, apart: str) -> None:
        """Copy a file that is there and that the script changes or moves, once, to where it does so."""
        seen = self._seen(path, apart)
        if os.fsdecode(seen) != apart and _exists(os.fsdecode(seen)):
            make_folders(os.path.dirname(apart))
            if os.path.isdir(seen):
                shutil.copytree(seen, apart)
            else:
                shutil.copyfile(seen, apart)

    def _needs(self, path: Any, apart: str) -> str:
        seen = os.fsdecode(self._seen(path, apart))
        if not _exists(seen):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        return seen

    def _lacks(self, path: Any, apart: str) -> None:
        if _exists(os.fsdecode(self._seen(path, apart))):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(path))

    def _descriptor(self, function: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            apart = None if dir_fd is not None else self.apart(path)
            if apart is None or not flags & _WRITING:
                return function(self._seen(path, apart), flags, mode, dir_fd=dir_fd)
            if flags & os.O_CREAT and flags & os.O_EXCL:
                self._lacks(path, apart)
            elif not flags & os.O_TRUNC:
                self._copied(path, apart)
            return function(self.written(path, apart), flags, mode)

        return opened

    def _looked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        at_links = function.__name__ in ("lstat", "readlink")

        def looked(path: Any = ".", *args: Any, **options: Any) -> Any:
            follows = not at_links and options.get("follow_symlinks", True)
            return function(self._seen(path, self.apart(path, follows=follows)), *args, **options)

        return looked

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Change what is known of a file beside its bytes, where it is the script's own."""

        def marked(path: Any, *args: Any, **options: Any) -> None:
            apart = self.apart(path)
            if apart is not None:
                self._needs(path, apart)
            if apart is None or _exists(apart):
                function(path if apart is None else apart, *args, **options)

        return marked

    def _truncated(self, path: Any, length: int) -> None:
        apart = self.apart(path)
        if apart is not None:
            self._copied(path, apart)
            self._needs(path, apart)
        _TRUNCATE(path if apart is None else self.written(path, apart), length)

    def _linked(self, src: Any, dst: Any, **_: Any) -> None:
        """Give a file a second name; one that is really there is copied, so that it is not changed by that name."""
        source, target = self.apart(src), self.apart(dst, follows=False)
        if source is not None:
            self._copied(src, source)
            self._needs(src, source)
        if target is not None:
            self._lacks(dst, target)
        _LINK(src if source is None else source, dst if target is None else self.written(dst, target))

    def _named(self, src: Any, dst: Any, *args: Any, **_: Any) -> None:
        apart = self.apart(dst, follows=False)
        if apart is not None:
            self._lacks(dst, apart)
            apart = self.written(dst, apart)
            self._links[_named_by(apart, self._scratch)] = os.fsdecode(src)
        _SYMLINK(src, dst if apart is None else apart, *args)

    def _entered(self, path: Any) -> None:
        """Go to a folder; where it is the script's alone, it bears the name that the script gave it."""
        apart = self.apart(path)
        named = os.fsdecode(path) if apart is None else _named_by(apart, self._scratch)
        own = apart is not None and (named in self._removed or not _exists(named))
        _ENTER(apart if own and apart else named)
        self._folder = named if own else ""

    def _listed(self, function: Callable[..., Any], name_of: Callable[[Any], Any]) -> Callable[..., Any]:
        """List what is in a folder, and what the script has written there."""

        def listed(path: Any = ".") -> Any:
            apart = None if path is None else self.apart(path)
            written = apart is not None and _exists(apart)
            if apart is None or not (written or self._removed):
                return function(self._seen(path, apart))
            folder = _named_by(apart, self._scratch)
            names: dict[str, Any] = {}
            if folder not in self._removed:
                with suppress(*[FileNotFoundError] if written else []):  # it may be the script's alone
                    names = {
                        name_of(one): one
                        for one in function(os.fsencode(folder) if isinstance(path, bytes) else folder)
                    }
            names = {
                name: one for name, one in names.items() if os.path.join(folder, os.fsdecode(name)) not in self._removed
            }
            if written or folder in self._removed:
                names |= {
                    name_of(one): one for one in function(os.fsencode(apart) if isinstance(path, bytes) else apart)
                }
            return list(names.values()) if function.__name__ == "listdir" else _Entries(names.values())

        return listed

    def _made(self, function: Callable[..., None]) -> Callable[..., None]:
        def made(path: Any, *args: Any, **options: Any) -> None:
            apart = self.apart(path)
            if apart is None:
                return function(path, *args, **options)
            self._lacks(path, apart)
            return function(self.written(path, apart), *args)

        return made

    def _changed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Remove a file or a folder."""

        def changed(path: Any, *args: Any, **options: Any) -> Any:
            apart = self.apart(path, follows=False)
            if apart is None:
                return function(path, *args, **options)
            self._needs(path, apart)
            self._skipped.setdefault(os.fsdecode(path), 0)
            if _exists(apart):
                function(apart)
            named = _named_by(apart, self._scratch)
            self._links.pop(named, None)
            self._removed.add(named)
            return None

        return changed

    def _moved(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def moved(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            place, apart = self.apart(source, follows=False), self.apart(target, follows=False)
            if place is not None:
                self._copied(source, place)
            if not _exists(place or source):
                return None
            if place is not None:
                self._removed.add(_named_by(place, self._scratch))
                self._rename_links(place, apart)
            return function(place or source, target if apart is None else self.written(target, apart), *args, **options)

        return moved

    def _rename_links(self, place: str, apart: str | None) -> None:
        before, after = _named_by(place, self._scratch), apart and _named_by(apart, self._scratch)
        self._links.pop(after or "", None)
        for link in [one for one in self._links if f"{one}{os.sep}".startswith(f"{before}{os.sep}")]:
            named = self._links.pop(link)
            if after:
                self._links[after + link[len(before) :]] = named


class _Entries(AbstractContextManager[Any], Iterator[Any]):
    """What ``os.scandir`` returns, of entries that are known."""

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        """Close nothing."""

    def close(self) -> None:
        """Close nothing."""


def _named_by(apart: str, scratch: str) -> str:
    """Return the name under which a script knows what lies in the sandbox."""
    return os.path.join(os.sep, os.path.relpath(apart, scratch))


def _exists(path: Any) -> bool:
    try:
        _LOOK(path)
    except (OSError, ValueError):
        return False
    return True


def make_folders(path: str) -> None:
    """Make a folder, and those that it lies in, where they are named."""
    if path and not _exists(path):
        make_folders(os.path.dirname(path))
        _MAKE(path)


_LOOK, _MAKE, _ENTER, _FOLDER = os.lstat, os.mkdir, os.chdir, os.getcwd
_TRUNCATE, _LINK, _SYMLINK = os.truncate, os.link, os.symlink
