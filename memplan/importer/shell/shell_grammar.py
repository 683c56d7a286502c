"""The grammar of shell scripts: commands, chains of them, branches, loops and functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError
from memplan.importer.shell.shell_tokens import DEEPEST, Token

_FUNCTION = re.compile(r"[A-Za-z_][A-Za-z0-9_:.-]*")
_ENDS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}"))
_SEPARATORS = frozenset((";", "&", "\n", ";;"))


@dataclass(frozen=True, slots=True)
class Simple:
    """A command with its words, or assignments alone."""

    words: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands of which each runs as the one before it ended: ``&&``, ``||``, or ``|`` whatever that was; ``!`` turns its end round."""

    parts: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class Branches:
    """``if``: conditions with what runs where they hold, the last without one where there is an ``else``."""

    parts: tuple[tuple[tuple[Node, ...] | None, tuple[Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over words, or while a condition holds."""

    body: tuple[Node, ...]
    variable: str = ""
    items: tuple[Token, ...] = ()
    condition: tuple[Node, ...] = ()
    until: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A word, and what runs for the patterns that it fits."""

    word: Token
    parts: tuple[tuple[tuple[str, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Commands in braces or brackets."""

    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A function's name and body."""

    name: str
    body: Node


Node = Simple | Chain | Branches | Loop | Case | Group | Function


def parsed(tokens: Sequence[Token], name: str) -> tuple[Node, ...]:
    """Return the commands of a script.

    Raises:
        InvalidFileError: A branch or loop does not end, or is nested too deeply.
    """
    parser = _Parser(tokens, name)
    nodes = parser.commands()
    if parser.at < len(tokens):
        raise parser.wrong(f"{parser.text()!r} ends nothing")
    return nodes


class _Parser:
    """Tokens, and how far they have been read."""

    def __init__(self, tokens: Sequence[Token], name: str) -> None:
        self.tokens, self.name, self.at, self.depth = tokens, name, 0, 0

    def text(self) -> str:
        """Return the next token's text; nothing at the end."""
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def _is_operator(self, *texts: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at].operator and self.text() in texts

    def _is_word(self, *texts: str) -> bool:
        return self.at < len(self.tokens) and not self.tokens[self.at].operator and self.text() in texts

    def wrong(self, what: str) -> InvalidFileError:
        """Return the error of what cannot be read here."""
        line = self.tokens[min(self.at, len(self.tokens) - 1)].line if self.tokens else 1
        return InvalidFileError([f"{self.name}:{line}: not a shell script that can be read: {what}"])

    def _next(self) -> Token:
        if self.at >= len(self.tokens):
            raise self.wrong("it ends too soon")
        self.at += 1
        return self.tokens[self.at - 1]

    def _expect(self, word: str) -> None:
        self._pass_separators()
        if not self._is_word(word):
            raise self.wrong(f"expected {word}, got {self.text()[:40]!r}")
        self.at += 1

    def _pass_separators(self) -> None:
        while self._is_operator(*_SEPARATORS):
            self.at += 1

    def commands(self) -> tuple[Node, ...]:
        """Return commands up to a word or bracket that ends them."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.wrong("nested too deeply")
        nodes: list[Node] = []
        while True:
            while self._is_operator(";", "&", "\n"):
                self.at += 1
            if self.at >= len(self.tokens) or self._is_operator(")", ";;") or self._is_word(*_ENDS):
                self.depth -= 1
                return tuple(nodes)
            nodes.append(self._chain())

    def _chain(self) -> Node:
        parts = [("", self._command())]
        while self._is_operator("&&", "||", "|", "|&"):
            sign = self._next().text
            self._pass_newlines()
            parts.append((sign, self._command()))
        return parts[0][1] if len(parts) == 1 else Chain(tuple(parts))

    def _pass_newlines(self) -> None:
        while self._is_operator("\n"):
            self.at += 1

    def _command(self) -> Node:
        if self._is_word("!"):
            self.at += 1
            return Chain((("!", self._command()),))
        if self._is_operator("("):
            return self._bracketed(")", operator=True)
        if self._is_word("{"):
            return self._bracketed("}", operator=False)
        for words, read in (
            (("if",), self._branches),
            (("for", "select"), self._for),
            (("while", "until"), self._while),
            (("case",), self._case),
            (("function",), self._function),
            (("[[",), self._test),
        ):
            if self._is_word(*words):
                return read()
        following = self.tokens[self.at + 1 : self.at + 3]
        if (
            _FUNCTION.fullmatch(self.text())
            and len(following) == 2
            and all(t.operator for t in following)
            and [t.text for t in following] == ["(", ")"]
        ):
            return self._function()
        return self._simple()

    def _bracketed(self, end: str, *, operator: bool) -> Group:
        self.at += 1
        body = self.commands()
        if not (self._is_operator(end) if operator else self._is_word(end)):
            raise self.wrong(f"expected {end!r}, got {self.text()[:40]!r}")
        self.at += 1
        return Group(body)

    def _branches(self) -> Branches:
        parts: list[tuple[tuple[Node, ...] | None, tuple[Node, ...]]] = []
        while self._is_word("if", "elif"):
            self.at += 1
            condition = self.commands()
            self._expect("then")
            parts.append((condition, self.commands()))
        if self._is_word("else"):
            self.at += 1
            parts.append((None, self.commands()))
        self._expect("fi")
        return Branches(tuple(parts))

    def _for(self) -> Loop:
        self.at += 1
        variable, items = "", []
        if not self._is_operator("("):
            variable = self._next().text
            self._pass_newlines()
            if self._is_word("in"):
                self.at += 1
                while self.at < len(self.tokens) and not self.tokens[self.at].operator:
                    items.append(self._next())
        while self.at < len(self.tokens) and not self._is_word("do"):
            self.at += 1
        self._expect("do")
        body = self.commands()
        self._expect("done")
        return Loop(body, variable, tuple(items))

    def _while(self) -> Loop:
        until = self._next().text == "until"
        condition = self.commands()
        self._expect("do")
        body = self.commands()
        self._expect("done")
        return Loop(body, condition=condition, until=until)

    def _case(self) -> Case:
        self.at += 1
        word = self._next()
        self._expect("in")
        parts = []
        self._pass_separators()
        while not self._is_word("esac"):
            patterns = []
            while not self._is_operator(")"):
                token = self._next()
                patterns += [] if token.operator else [token.text]
            self.at += 1
            parts.append((tuple(patterns), self.commands()))
            self._pass_separators()
        self.at += 1
        return Case(word, tuple(parts))

    def _function(self) -> Function:
        if self._is_word("function"):
            self.at += 1
        name = self._next().text
        while self._is_operator("(", ")"):
            self.at += 1
        self._pass_newlines()
        return Function(name, self._command())

    def _test(self) -> Simple:
        words = [self._next()]
        while words[-1].text != "]]":
            words.append(self._next())
        return Simple(tuple(words))

    def _simple(self) -> Simple:
        words = []
        while self.at < len(self.tokens) and not self.tokens[self.at].operator:
            words.append(self._next())
        if not words:
            raise self.wrong(f"{self.text()[:40]!r} where a command was expected")
        return Simple(tuple(words))
