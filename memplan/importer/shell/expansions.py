"""What a shell puts in for variables, arithmetic and quotes of a word; nothing is run, and what is not known stays as it is."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

UNKNOWN = None
"""The value of a variable that was set to something that nobody can tell from the script."""
LONGEST = 2**16
"""Characters of a word or variable; no flag has as many."""
DEEPEST = 20

REFERENCE = re.compile(r"\$\{|\$[A-Za-z0-9_(@*]")
"""What a shell, or OmegaConf, would put a value in for."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BRACED = re.compile(
    r"(?P<count>#(?!\}))?(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#])(?:\[(?P<at>[^]]*)\])?(?P<rest>.*)", re.DOTALL
)
_DEFAULT = re.compile(r"(:?[-=+?])(.*)", re.DOTALL)
_CUT = re.compile(r"(##?|%%?)(.*)", re.DOTALL)
_EXPR = re.compile(r"expr\s+(.+)", re.DOTALL)
_CHOICE = re.compile(r"([^?]+)\?([^:?]+):([^:?]+)")
_INDEX = re.compile(r"[0-9]{1,6}")
_NUMBER = re.compile(r"-?[0-9]{1,18}")

NOT_GIVEN = re.compile(r"\$[0-9]|\$\{[0-9]+\}")
"""The value of a variable that was set to an argument which is not given."""

Value = str | list[str] | None


@dataclass(slots=True)
class Scope:
    """What is known of variables."""

    variables: dict[str, Value] = field(default_factory=dict)  # Those that are set; the unknown ones too
    arguments: tuple[str, ...] = ()  # ``$1`` and further
    in_test: bool = False  # Whether what was never set counts as empty


def fields(word: str, scope: Scope) -> list[str]:
    """Return what a word becomes: several words where an array, or an unquoted variable of several words, stands in it."""
    return _Word(word, scope).fields()


def text_of(word: str, scope: Scope) -> str:
    """Return what a word becomes where it is not split, as the value of a variable."""
    return " ".join(_Word(word, scope, split=False).fields())


def filled(text: str, scope: Scope) -> str:
    """Return a text, without quotes of its own, in which what is known of variables and arithmetic is filled in."""
    parts: list[str] = []
    at = 0
    while (start := text.find("$", at)) >= 0:
        end = _end_of_expansion(text, start)
        value = _expanded(text[start:end], scope, 0)
        known = text[start:end] if value is UNKNOWN else " ".join(value) if isinstance(value, list) else value
        parts += [text[at:start], known]
        at = end
    return "".join((*parts, text[at:]))[:LONGEST]


class _Word:
    """A word that is being expanded."""

    def __init__(self, word: str, scope: Scope, *, split: bool = True, depth: int = 0) -> None:
        self.word, self.scope, self.split, self.depth = word, scope, split, depth
        self.done: list[str] = []
        self.open: str | None = None  # What there is of the next field
        self.at = 0

    def fields(self) -> list[str]:
        while self.at < len(self.word):
            letter = self.word[self.at]
            if letter == "'":
                self._single()
            elif letter == '"':
                self._double()
            elif letter == "\\":
                self._add(self.word[self.at + 1 : self.at + 2])
                self.at += 2
            elif letter in "$`":
                self._dollar(quoted=False)
            else:
                self._add(letter)
                self.at += 1
        return self.done + ([] if self.open is None else [self.open])

    def _add(self, text: str) -> None:
        self.open = ((self.open or "") + text)[:LONGEST]

    def _single(self) -> None:
        end = self.word.find("'", self.at + 1)
        end = len(self.word) if end < 0 else end
        self._add(self.word[self.at + 1 : end])
        self.at = end + 1

    def _double(self) -> None:
        self.at += 1
        several = self.word.startswith(('$@"', '${@}"'), self.at)
        if not several:
            self._add("")
        while self.at < len(self.word) and self.word[self.at] != '"':
            letter = self.word[self.at]
            if letter == "\\" and self.word[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`"):
                self._add(self.word[self.at + 1])
                self.at += 2
            elif letter in "$`":
                self._dollar(quoted=True)
            else:
                self._add(letter)
                self.at += 1
        self.at += 1

    def _dollar(self, *, quoted: bool) -> None:
        end = _end_of_expansion(self.word, self.at)
        raw = self.word[self.at : end]
        self.at = end
        value = _expanded(raw, self.scope, self.depth)
        if value is UNKNOWN:
            self._add(raw)
        elif isinstance(value, list) and quoted and raw.endswith(("*", "[*]}")):
            self._add(" ".join(value))
        elif isinstance(value, list):
            self._splice(value if quoted else [word for item in value for word in _split(item)])
        elif quoted or not self.split:
            self._add(value)
        else:
            self._splice(_split(value), led=value[:1].isspace(), ended=value[-1:].isspace())

    def _splice(self, items: list[str], *, led: bool = False, ended: bool = False) -> None:
        if not self.split:
            self._add(" ".join(items))
            return
        if led:
            self._close()
        for place, item in enumerate(items):
            if place:
                self._close()
            self._add(item)
        if ended:
            self._close()

    def _close(self) -> None:
        if self.open is not None:
            self.done.append(self.open)
        self.open = None


def _end_of_expansion(word: str, at: int) -> int:
    """Return where an expansion that begins with ``$`` or a backtick ends."""
    if word[at] == "`":
        end = word.find("`", at + 1)
        return len(word) if end < 0 else end + 1
    following = word[at + 1 : at + 2]
    if following in ("(", "{"):
        return balanced_end(word, at + 1)
    name = _NAME.match(word, at + 1)
    return name.end() if name else at + 1


def balanced_end(text: str, at: int) -> int:
    """Return where the bracket at a place is closed, brackets of its kind inside it and quotes passed."""
    opening, closing = text[at], ")" if text[at] == "(" else "}"
    depth, quote = 0, ""
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter == opening) - (letter == closing)
            if depth == 0:
                return at + 1
        at += 1
    return len(text)


def _split(text: str) -> list[str]:
    """Return the words of a value; what is not known in it is not split."""
    words: list[str] = []
    at, start = 0, 0
    while at < len(text):
        if text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = balanced_end(text, at + 1)
        elif text[at].isspace():
            words += [text[start:at]]
            at = start = at + 1
        else:
            at += 1
    return [word for word in (*words, text[start:]) if word]


def _expanded(raw: str, scope: Scope, depth: int) -> Value:
    """Return what stands for an expansion; a list for all of an array, and :data:`UNKNOWN` where nobody can tell."""
    if depth > DEEPEST or raw == "$":
        return "$" if raw == "$" else UNKNOWN
    if raw.startswith("$((") and raw.endswith("))"):
        return _number(raw[3:-2], scope, depth)
    if raw.startswith(("$(", "`")):
        inner = raw[2:-1] if raw.startswith("$(") else raw[1:-1]
        computed = _EXPR.fullmatch(inner.strip())
        return _number(computed[1].replace("\\*", "*"), scope, depth) if computed else UNKNOWN
    return _braced(raw[2:-1], scope, depth) if raw.startswith("${") else _variable(raw[1:], scope)


def _variable(name: str, scope: Scope, place: str = "") -> Value:
    if name in ("@", "*"):
        return list(scope.arguments)
    if name == "#":
        return str(len(scope.arguments))
    if _INDEX.fullmatch(name) and 0 < int(name) <= len(scope.arguments):
        return scope.arguments[int(name) - 1]
    if (item := f"{name}[{place}]") in scope.variables:
        return scope.variables[item]
    if name not in scope.variables:
        return "" if scope.in_test else UNKNOWN
    value = scope.variables[name]
    if not isinstance(value, list):
        return value if place in ("", "@", "*", "0") else UNKNOWN
    if place in ("@", "*"):
        return value
    index = int(place) if _INDEX.fullmatch(place) else 0 if not place else len(value)
    return value[index] if index < len(value) else UNKNOWN


def _braced(inner: str, scope: Scope, depth: int) -> Value:
    """Return what stands for ``${ ... }``: a variable, how long it is, its default, or a part of it."""
    parts = _BRACED.fullmatch(inner)
    if parts is None:
        return UNKNOWN
    name, rest = parts["name"], parts["rest"]
    value = _variable(name, scope, _plain(parts["at"] or "", scope, depth))
    if parts["count"]:
        return UNKNOWN if value is UNKNOWN else str(len(value))
    if not rest:
        return value
    if otherwise := _DEFAULT.fullmatch(rest):
        return _with_default(name, value, otherwise[1], otherwise[2], scope, depth)
    if not isinstance(value, str):
        return UNKNOWN
    if cut := _CUT.fullmatch(rest):
        return _without(value, cut[1], _plain(cut[2], scope, depth))
    return {",,": value.lower(), "^^": value.upper()}.get(rest, UNKNOWN)


def _with_default(name: str, value: Value, sign: str, word: str, scope: Scope, depth: int) -> Value:
    unset = name not in scope.variables and not (name.isdigit() and value is not UNKNOWN)
    empty = isinstance(value, str) and (not value or bool(NOT_GIVEN.fullmatch(value))) and sign.startswith(":")
    if sign.endswith("+"):
        return "" if unset or empty else UNKNOWN if value is UNKNOWN else _plain(word, scope, depth)
    if sign.endswith("?") or not (unset or empty):
        return value
    result = _plain(word, scope, depth)
    if sign.endswith("=") and not name.isdigit():
        scope.variables[name] = result
    return result


def _plain(word: str, scope: Scope, depth: int) -> str:
    return " ".join(_Word(word, scope, split=False, depth=depth + 1).fields())


def _without(value: str, sign: str, pattern: str) -> str:
    """Return a value without what a pattern fits at its beginning or end: the shortest piece, or the longest."""
    lengths = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    for length in lengths if len(value) <= 1000 else ():
        piece = value[:length] if sign[0] == "#" else value[len(value) - length :]
        if fnmatchcase(piece, pattern):
            return value[length:] if sign[0] == "#" else value[: len(value) - length]
    return value


def _quotient(left: int, right: int) -> int:
    """Return a quotient of whole numbers as C has it: toward zero."""
    return left // right if (left < 0) == (right < 0) else -(-left // right)


OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Div: _quotient,
}

COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _number(text: str, scope: Scope, depth: int) -> Value:
    """Return what arithmetic of whole numbers comes to, :data:`UNKNOWN` where a part of it is not known."""
    plain = _plain(text, scope, depth)
    if "$" in plain or len(plain) > 1000:
        return UNKNOWN
    try:
        if chosen := _CHOICE.fullmatch(plain):
            holds = _evaluated(ast.parse(chosen[1].strip(), mode="eval").body, scope)
            plain = chosen[2] if holds else chosen[3]
        return str(_evaluated(ast.parse(plain.strip(), mode="eval").body, scope))
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError, MemoryError):
        return UNKNOWN


def _evaluated(node: ast.expr, scope: Scope) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        value = _variable(node.id, scope)
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            return int(value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand, scope)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _evaluated(node.left, scope), _evaluated(node.right, scope)
        if max(abs(left), abs(right)) < 2**40:
            return OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        left, right = _evaluated(node.left, scope), _evaluated(node.comparators[0], scope)
        return int(COMPARISONS[type(node.ops[0])](left, right))
    raise ValueError("no arithmetic of whole numbers")
