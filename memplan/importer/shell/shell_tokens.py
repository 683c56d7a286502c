"""Shell scripts as words and operators, each with its line; comments, joined lines and here-documents are gone."""

from __future__ import annotations

import re

from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError

OPERATORS = ("&&", "||", ";;", "|&", ";", "&", "|", "(", ")", "\n")
"""What stands between commands; the longer first."""

_REDIRECTION = re.compile(r"[0-9]*(?:<<<|<<-?|<&|>&|>>|>\||<>|<|>)|&>>?")
_NEXT_WORD = re.compile(r"[ \t]*(\\?['\"]?)([^\s;&|<>()'\"]+)['\"]?")
HERE_DOCUMENT = "<<"
WRITTEN, APPENDED = ">", ">>"
"""Texts of tokens whose ``document`` is the word of a file that a command's output goes to."""
_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=\(")
CLOSED_BY = {"(": ")", "{": "}"}
DEEPEST = 40


@dataclass(frozen=True, slots=True)
class Token:
    """A word as it is written, with its quotes; an operator; or the words between the brackets of an array."""

    text: str
    line: int
    operator: bool = False
    words: tuple[Token, ...] | None = None  # Of ``NAME=( ... )``, whose name ``text`` ends with
    document: str | None = (
        None  # The text of a here-document, in double quotes where it is expanded; the word of a file
    )

    def moved(self, line: int) -> Token:
        """Return a word of a script that begins at another's line."""
        inner = None if self.words is None else tuple(word.moved(line) for word in self.words)
        return Token(self.text, line + self.line - 1, self.operator, inner, self.document)


_QUOTE = re.compile(r'(\\*)"')


def _escaped(quote: re.Match[str]) -> str:
    """Return a quote of a here-document as it is written in double quotes, and a single backslash before it, which stays."""
    return quote[1] + "\\" * (len(quote[1]) % 2) + '\\"'


def tokens(text: str, name: str) -> list[Token]:
    """Return the words and operators of a script.

    Raises:
        InvalidFileError: A quote, bracket or here-document does not end.
    """
    return _Reader(text.replace("\r\n", "\n"), name).all()


class _Reader:
    """A script, and how far it has been read."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.at = text, name, 0
        self.line = 1
        self.in_array = False  # None of which holds another
        self.resume = 0  # Where the line behind the here-documents that begin on this line starts; 0 where none do

    def all(self) -> list[Token]:
        """Return everything to the end."""
        return self.until("")

    def until(self, end: str) -> list[Token]:
        """Return what comes before a closing bracket that closes nothing else, which is passed."""
        result: list[Token] = []
        while self.at < len(self.text):
            self._pass_blanks()
            if end and self.text.startswith(end, self.at):
                self.at += 1
                return result
            if (token := self._token()) is not None:
                result.append(token)
        if end:
            raise self._unclosed("a bracket", self.line)
        return result

    def _pass_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
            elif self.text[self.at] == "#":
                self.at = self._end_of_line()
            else:
                return

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _token(self) -> Token | None:
        if self.at >= len(self.text):
            return None
        line = self.line
        if redirected := _REDIRECTION.match(self.text, self.at):
            return self._redirection(redirected)
        for operator in OPERATORS:
            if self.text.startswith(operator, self.at):
                self.at += len(operator)
                if operator == "\n":
                    self.line += 1
                    self._step(max(self.resume - self.at, 0))
                    self.resume = 0
                return Token(operator, line, operator=True)
        if array := _ARRAY.match(self.text, self.at):
            if self.in_array:
                raise InvalidFileError(
                    [f"{self.name}:{line}: not a shell script that can be read: an array in an array"]
                )
            self.at, self.in_array = array.end(), True
            words = tuple(token for token in self.until(")") if not token.operator and token.document is None)
            self.in_array = False
            return Token(f"{array[1]}{array[2]}", line, words=words)
        start = self.at
        self._pass_word()
        return Token(self.text[start : self.at].replace("\\\n", ""), line)

    def _redirection(self, redirected: re.Match[str]) -> Token | None:
        """Pass a redirection and the word behind it; return a here-document, whose lines follow this one, or the output's file."""
        self.at = redirected.end()
        sign = redirected[0].lstrip("0123456789")
        if sign in ("<<", "<<-") and (end := _NEXT_WORD.match(self.text, self.at)):
            self.at = end.end()
            text = self._document(end[2])
            text = re.sub(r"^\t+", "", text, flags=re.MULTILINE) if sign == "<<-" else text
            plain = text.replace("'", "'\\''") if end[1] else _QUOTE.sub(_escaped, text)
            return Token(HERE_DOCUMENT, self.line, document=f"'{plain}'" if end[1] else f'"{plain}"')
        self._pass_blanks()
        start = self.at
        if self.at < len(self.text) and self.text[self.at] not in "\n;&|()":
            self._pass_word()
            if redirected[0].lstrip("1").rstrip("|") in (WRITTEN, APPENDED):
                return Token(sign.rstrip("|"), self.line, document=self.text[start : self.at])
        elif self.text.startswith("(", self.at):
            self._pass_balanced(0)
        return None

    def _document(self, end: str) -> str:
        """Return the text of a here-document that begins behind this line, or behind those that this line began before."""
        start = self.resume or self._end_of_line() + 1
        closed = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(self.text, start)
        if closed is None:
            raise self._unclosed(f"the here-document that {end[:40]!r} ends", self.line)
        self.resume = closed.end()
        return self.text[start : closed.start()].replace("\\\n", "")

    def _pass_word(self) -> None:
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\n;&|()<>":
                return
            self._pass_character(character, 0)

    def _pass_character(self, character: str, depth: int) -> None:
        if character in "'\"`":
            self._pass_quoted(character, depth)
        elif character == "$" and self.text[self.at + 1 : self.at + 2] in CLOSED_BY:
            self.at += 1
            self._pass_balanced(depth)
        elif self.text.startswith("$'", self.at):
            self.at += 1
            self._pass_quoted("'", depth)
        else:
            self._step(2 if character == "\\" else 1)

    def _pass_quoted(self, quote: str, depth: int) -> None:
        line = self.line
        self._step(1)
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == quote:
                self._step(1)
                return
            if quote != "'" and character == "\\":
                self._step(2)
            elif quote == '"' and character in "$`":
                self._pass_character(character, depth + 1)
            else:
                self._step(1)
        raise self._unclosed("a quote", line)

    def _pass_balanced(self, depth: int) -> None:
        """Pass brackets and what stands between them."""
        line, opening = self.line, self.text[self.at]
        if depth > DEEPEST:
            raise InvalidFileError([f"{self.name}:{line}: nested too deeply"])
        self._step(1)
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == CLOSED_BY[opening]:
                self._step(1)
                return
            if character == opening:
                self._pass_balanced(depth + 1)
            else:
                self._pass_character(character, depth + 1)
        raise self._unclosed(f"{opening!r}", line)

    def _step(self, letters: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + letters)
        self.at = min(self.at + letters, len(self.text))

    def _unclosed(self, what: str, line: int) -> InvalidFileError:
        return InvalidFileError([f"{self.name}:{line}: not a shell script that can be read: {what} does not end"])
