"""What a shell script writes to files of its own: a configuration in a here-document, which a command then names."""

import re
from collections.abc import Mapping, Sequence
from posixpath import isabs, normpath

from memplan.importer.shell.expansions import Scope, text_of
from memplan.importer.shell.shell_tokens import APPENDED, WRITTEN, Token

COPIERS = frozenset(("cat", "tee"))
"""Commands that give on what they are given."""
EDITORS = frozenset(("sed", "cp", "mv", "rm"))
"""Commands that change files which they name."""

Text = tuple[str, int]
"""What is written, and the line where it begins."""


def note_written(written: dict[str, Text], words: Sequence[Token], text: Text | None, scope: Scope, sure: bool) -> None:
    """Note what stands in the files that a command's output goes to, by their paths; nothing where only a run would tell.

    Args:
        text: What the command gives on, or None where that is not known.
        sure: Whether the command runs.
    """
    targets = [(token.document or "", token.text == APPENDED) for token in words if token.text in (WRITTEN, APPENDED)]
    plain = [token.text for token in words if token.document is None]
    if plain[:1] == ["tee"]:
        targets += [(word, "-a" in plain) for word in plain[1:] if not word.startswith("-")]
    for word, appended in targets:
        path = normpath(text_of(word, scope))
        earlier = written.pop(path, None)
        before = earlier if appended else ("", 0)
        if sure and text is not None and before is not None:
            written[path] = (before[0] + text[0], before[1] or text[1])


STANDARD_INPUT = "standard_input.py"
"""What stands for a program that Python reads from a here-document."""
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")


def note_program(written: dict[str, Text], words: Sequence[Token], text: Text) -> Token | None:
    """Note a here-document that Python runs as a file, and return that file's name; None where it reads no program from it."""
    if not (_PYTHON.fullmatch(words[0].text) and [word.text for word in words[1:]] in ([], ["-"])):
        return None
    written[STANDARD_INPUT] = text
    return Token(STANDARD_INPUT, words[0].line)


def note_edited(written: dict[str, Text], words: Sequence[str]) -> None:
    """Forget what stands in files that a command changes; what is copied stays as it is."""
    changed = words[-1:] if words[0] == "cp" else words[1:]
    for word in changed if words[0] in EDITORS else ():
        written.pop(normpath(word), None)


def text_written(written: Mapping[str, Text], name: str) -> Text | None:
    """Return what a script has written to the file that a command names, with the line where that begins.

    Of a relative path and a whole one that ends with it nobody can tell the folder: they are the same where no other is.

    Example:
        >>> text_written({"job.yaml": ("a: 1", 3)}, "/content/job.yaml")
        ('a: 1', 3)
    """
    path = normpath(name)
    if path in written:
        return written[path]
    alike = [
        one for one in written if isabs(one) != isabs(path) and (one.endswith(f"/{path}") or path.endswith(f"/{one}"))
    ]
    return written[alike[0]] if len(alike) == 1 else None
