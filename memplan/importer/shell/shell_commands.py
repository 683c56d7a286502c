"""The commands that a shell script would start, with their variables filled in; none of them is started."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from posixpath import join

from memplan.errors import InvalidFileError, printable
from memplan.importer.shell.containers import container_variables, reads_script, script_within, started_inside
from memplan.importer.shell.expansions import UNKNOWN, Scope, Value, fields, text_of
from memplan.importer.shell.shell_grammar import Branches, Case, Chain, Function, Loop, Node, Simple, parsed
from memplan.importer.shell.shell_tests import outcome
from memplan.importer.shell.shell_tokens import HERE_DOCUMENT, Token, tokens
from memplan.importer.shell.shell_turns import ShellCommand, Turn
from memplan.importer.shell.slurm_variables import scheduled_variables, step_variables
from memplan.importer.shell.written_files import COPIERS, Text, note_edited, note_program, note_written

MOST = 5_000
"""Commands of a script that are followed; calls of functions inside functions could be without end."""
DEEPEST = 8
SETTING = frozenset(("export", "declare", "typeset", "readonly", "local"))
TESTS = frozenset(("[", "[[", "test"))
QUIET = frozenset(("echo", "printf", "cat", "mkdir", "cd", "pushd", "popd", "ls", "rm", "cp", "mv", "ln", "touch", "chmod", "tar", "unzip", "wget", "curl", "pip", "pip3", "conda", "git", "sleep", "tee", "grep", "sed", "awk", "module", "ulimit", "trap", "set", "shift", "wait", "kill", "exit", "return", "source", ".", "huggingface-cli", "nvidia-smi", "date", "hostname",))  # fmt: skip
"""Commands that start no training."""
WRAPPERS = frozenset(("exec", "nohup", "time", "sudo", "command", "env"))
"""Words in front of a command that change nothing of it."""
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)
_PLACED = re.compile(r"\[([^]]+)\]=(.*)", re.DOTALL)
_ITEM = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[([^]]+)\]=(.*)", re.DOTALL)
"""An item of an associative array, as it is given inside the array and by itself."""
_WHOLE = re.compile(r"\"?\$\{?([A-Za-z_][A-Za-z0-9_]*)(?:\[[@*]\])?\}?\"?")
_OWN_WORDS = re.compile(r"ARGS|OPTS|FLAGS|EXTRA|OPTIONS", re.IGNORECASE)
"""Variables for further words, which a script's caller may set."""


def shell_commands(text: str, name: str, beside: Callable[[str], str] | None = None) -> list[ShellCommand]:
    """Return the commands of a script that may start a training job, in its order.

    Branches are followed where their tests can be told from the script; where not, what they set is not known.

    Args:
        beside: What stands in a file that the script takes up with ``source``; nothing where it is not there.

    Raises:
        InvalidFileError: It cannot be read as a shell script.
    """
    run = _Run(name, beside)
    run.scheduled(text)
    run.all(parsed(tokens(text, name), name), sure=True)
    return run.commands


@dataclass(slots=True)
class _Run:
    """What is known while a script is followed."""

    name: str
    beside: Callable[[str], str] | None
    scope: Scope = field(default_factory=Scope)
    lines: dict[str, list[int]] = field(default_factory=dict)  # Variable -> where it, or each of its words, was set
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[ShellCommand] = field(default_factory=list)
    written: dict[str, Text] = field(default_factory=dict)  # Path -> what stands in a file, where that is known
    folder: str = ""  # Where commands run, from where the script does
    turns: list[Turn] = field(default_factory=list)  # Loops that are followed now
    exports: bool = False  # Whether all variables are exported that are set now
    followed: int = 0
    depth: int = 0

    def scheduled(self, text: str) -> None:
        """Take up the variables that Slurm sets by a script's directives."""
        self.scope.variables |= (given := scheduled_variables(text))
        self.exported |= given.keys()
        if task := given.get("SLURM_ARRAY_TASK_ID"):
            self.turns.append(Turn("SLURM_ARRAY_TASK_ID", task, 0, 1 + text.count("\n", 0, text.find("#SBATCH"))))

    def all(self, nodes: Sequence[Node], *, sure: bool) -> bool | None:
        """Follow commands; return whether the last ends well, or None where nobody can tell."""
        ended: bool | None = True
        for node in nodes:
            ended = self.one(node, sure)
        return ended

    def one(self, node: Node, sure: bool) -> bool | None:
        """Follow a command, as :meth:`all`."""
        self.followed += 1
        if self.followed > MOST:
            raise InvalidFileError([f"{self.name}: more than {MOST:,} commands: give the one that trains"])
        if isinstance(node, Simple):
            return self._simple(node, sure)
        if isinstance(node, Chain):
            return self._chain(node, sure)
        if isinstance(node, Branches):
            return self._branches(node, sure)
        if isinstance(node, Loop):
            return self._loop(node, sure)
        if isinstance(node, Case):
            return self._case(node, sure)
        if isinstance(node, Function):
            self.functions[node.name] = node.body
            return True
        return self.all(node.body, sure=sure)

    def _chain(self, node: Chain, sure: bool) -> bool | None:
        ended: bool | None = True
        tested = False
        for sign, part in node.parts:
            if (sign == "&&" and ended is False) or (sign == "||" and ended is True):
                continue
            begun = sign not in ("&&", "||") or ended is not None or (sign == "&&" and not tested)
            ended = self.one(part, sure and begun)
            if sign == "!":
                ended = None if ended is None else not ended
            tested = isinstance(part, Simple) and bool(part.words) and part.words[0].text in TESTS
        return ended

    def _branches(self, node: Branches, sure: bool) -> bool | None:
        for condition, body in node.parts:
            holds = True if condition is None else self.all(condition, sure=sure)
            if holds is not False:
                self.all(body, sure=sure and holds is True)
            if holds is True:
                return None
            sure = sure and holds is not None
        return None

    def _loop(self, node: Loop, sure: bool) -> bool | None:
        if node.condition:
            holds = self.all(node.condition, sure=sure)
            if holds is node.until and holds is not None:
                return True
            self.all(node.body, sure=False)
            return None
        items = [item for token in node.items for item in fields(token.text, self.scope)]
        known = bool(items) and not any("$" in item for item in items)
        if node.variable:  # the first turn is followed
            self._set(node.variable, items[0] if known else UNKNOWN, node.items[:1], sure)
        before, files = dict(self.scope.variables), dict(self.written)
        turn = [Turn(node.variable, items[0], len(items), node.items[0].line)] if known and items[1:] else []
        self.turns += turn
        self.all(node.body, sure=sure and known)
        del self.turns[len(self.turns) - len(turn) :]
        if items[1:]:  # what the first turn leaves, the last need not
            variables = self.scope.variables
            changed = [name for name, value in variables.items() if before.get(name, "") != value]
            variables |= dict.fromkeys([node.variable, *changed], UNKNOWN)
            self.written = {path: text for path, text in self.written.items() if files.get(path) == text}
        return None

    def _case(self, node: Case, sure: bool) -> bool | None:
        word = text_of(node.word.text, Scope(self.scope.variables, self.scope.arguments, in_test=True))
        for patterns, body in node.parts:
            plain = [text_of(pattern, self.scope) for pattern in patterns]
            if "$" in word:
                self.all(body, sure=False)
            elif any(fnmatchcase(word, pattern) for pattern in plain):
                self.all(body, sure=sure)
                return None
        return None

    def _simple(self, node: Simple, sure: bool) -> bool | None:
        assigned = list(_leading_assignments(node.words))
        words = node.words[len(assigned) :]
        if not words:
            for token in assigned:
                self._assign(token, sure)
            return True if node.words else None
        if words[0].text in SETTING:
            return self._setting(words, sure)
        if words[0].text in TESTS:
            return outcome([token.text for token in words if token.document is None], self.scope)
        if document := next((token for token in words if token.text == HERE_DOCUMENT), None):
            return self._with_document(words, document, sure)
        note_written(self.written, words, None, self.scope, sure)
        expanded, lines, unset = self._expanded(words)
        while expanded and expanded[0] in WRAPPERS:
            expanded, lines = expanded[1:], lines[1:]
        return self._started(expanded, lines, unset, assigned, sure) if expanded else True

    def _started(
        self, words: list[str], lines: list[int], unset: list[tuple[str, int]], assigned: list[Token], sure: bool
    ) -> bool | None:
        first = words[0]
        if first.startswith("--"):
            why = "a comment, or a line without a backslash, above it ends the command that it is meant for"
            raise InvalidFileError(
                [f"{self.name}:{lines[0]}: {printable(first, 60)} is a command of its own here: {why}"]
            )
        if first in self.functions and self.depth < DEEPEST:
            for token in assigned:
                self._assign(token, sure)
            return self._called(first, words[1:], sure)
        if (text := script_within(words)) is not None:
            inside = container_variables(words) | step_variables(words, self.scope.variables)
            self.scope.variables |= inside
            self.exported |= inside.keys()
            return self._again(text, lines[0], sure)
        if first in ("read", "mapfile", "readarray", "getopts", "unset"):
            for word in words[1:]:
                if word.isidentifier():
                    self._set(word, UNKNOWN, (), sure=True)
            return False if first == "getopts" else None
        if first == "shift":
            count = words[1] if len(words) > 1 else "1"
            self.scope.arguments = self.scope.arguments[int(count) if count.isdigit() else 1 :]
        if first in ("cd", "pushd") and len(words) == 2 and sure and "$" not in words[1]:
            self.folder = join(self.folder, words[1])
        if first in ("source", ".") and self.beside and len(words) > 1 and (text := self.beside(words[1])):
            return self._again(text, lines[0], sure, moves=False)
        if first == "set" and {"-a", "+a"} & {*words}:
            self.exports = "-a" in words
        if first in ("true", ":", "false"):
            return first != "false"
        start = started_inside(words)
        if start or first.rpartition("/")[2] not in QUIET:
            environment = {name: self.scope.variables.get(name) for name in sorted(self.exported)}
            known = {name: value for name, value in environment.items() if isinstance(value, str)}
            own = [_ASSIGNED.fullmatch(token.text) for token in assigned]
            known |= {match[1]: text_of(match[3], self.scope) for match in own if match} | container_variables(words)
            where = (known, tuple(unset), dict(self.written), self.folder, tuple(self.turns))
            self.commands.append(ShellCommand(tuple(words[start:]), tuple(lines[start:]), *where))
        note_edited(self.written, words)
        return None

    def _with_document(self, words: Sequence[Token], document: Token, sure: bool) -> bool | None:
        """Follow a command that a here-document is given: ``read`` sets a variable to it, a shell runs it, ``cat`` writes it."""
        plain = [token for token in words if token.document is None]
        if not plain:
            return True  # nothing reads it
        text = text_of(document.document or "", self.scope)
        if plain[0].text == "read" and plain[-1].text.isidentifier():
            self._set(plain[-1].text, text.strip(), (document,), sure)
            return None
        if reads_script([token.text for token in plain]):
            self.scheduled(text)
            return self._again(text, document.line + 1, sure)
        if program := note_program(self.written, plain, (text, document.line + 1)):
            targets = [token for token in words if token.document is not None and token is not document]
            return self._simple(Simple((plain[0], program, *targets)), sure)
        copies = plain[0].text in COPIERS
        note_written(self.written, words, (text, document.line + 1) if copies else None, self.scope, sure)
        return True if copies else self._simple(Simple(tuple(plain)), sure)

    def _called(self, function: str, arguments: list[str], sure: bool) -> bool | None:
        before, self.scope.arguments = self.scope.arguments, tuple(arguments)
        self.depth += 1
        ended = self.one(self.functions[function], sure)
        self.depth -= 1
        self.scope.arguments = before
        return ended

    def _again(self, text: str, line: int, sure: bool, *, moves: bool = True) -> bool | None:
        """Follow a text that the shell reads as a script of its own; ``moves``: whether its lines are those behind ``line``."""
        if self.depth >= DEEPEST or "$" in text.partition(" ")[0]:
            return None
        self.depth += 1
        inner = [token.moved(line if moves else line - token.line + 1) for token in tokens(text, self.name)]
        ended = self.all(parsed(inner, self.name), sure=sure)
        self.depth -= 1
        return ended

    def _expanded(self, words: Sequence[Token]) -> tuple[list[str], list[int], list[tuple[str, int]]]:
        """Return the words of a command, where each stands, and those that are nothing since nobody sets them."""
        texts: list[str] = []
        lines: list[int] = []
        unset: list[tuple[str, int]] = []
        for token in words:
            if token.document is not None:
                continue
            items = fields(token.text, self.scope)
            whole = _WHOLE.fullmatch(token.text)
            if whole and items and whole[1] not in self.scope.variables and _is_further(texts, whole[1]):
                unset.append((token.text, token.line))
                continue
            places = self.lines.get(whole[1], []) if whole else []
            texts += items
            lines += places if len(places) == len(items) else [places[0] if places else token.line] * len(items)
        return texts, lines, unset

    def _setting(self, words: Sequence[Token], sure: bool) -> bool:
        exporting = words[0].text == "export" or any("x" in word.text for word in words if word.text.startswith("-"))
        for token in words[1:]:
            if token.words is not None or _ASSIGNED.fullmatch(token.text):
                self._assign(token, sure)
            name = re.match(r"[A-Za-z_][A-Za-z0-9_]*", token.text)
            if exporting and name:
                self.exported.add(name[0])
        return True

    def _assign(self, token: Token, sure: bool) -> None:
        if token.words is not None:
            name = token.text.removesuffix("+")
            placed = [_PLACED.fullmatch(word.text) for word in token.words]
            for item in [one for one in placed if one] if all(placed) else ():
                self._set(f"{name}[{text_of(item[1], self.scope)}]", text_of(item[2], self.scope), (token,), sure)
            words = [(item, word.line) for word in token.words for item in fields(word.text, self.scope)]
            before = self.scope.variables.get(name) if token.text.endswith("+") else []
            earlier_lines = self.lines.get(name, []) if before else []
            joined = [*before, *(item for item, _ in words)] if isinstance(before, list) else UNKNOWN
            self._set(name, joined, token.words, sure)
            if sure:
                self.lines[name] = [*earlier_lines, *(line for _, line in words)]
            return
        if match := _ITEM.fullmatch(token.text):
            self._set(f"{match[1]}[{text_of(match[2], self.scope)}]", text_of(match[3], self.scope), (token,), sure)
            return
        match = _ASSIGNED.fullmatch(token.text)
        if match is None:
            return
        name, value = match[1], text_of(match[3], self.scope)
        earlier = self.scope.variables.get(name, "") if match[2] else ""
        if isinstance(earlier, list):
            self._set(name, [f"{earlier[0]}{value}", *earlier[1:]] if earlier else [value], (token,), sure)
        elif earlier is UNKNOWN and match[2]:
            self._set(name, UNKNOWN, (token,), sure)
        else:
            self._set(name, f"{earlier}{value}", (token,), sure)

    def _set(self, name: str, value: Value, where: Sequence[Token], sure: bool) -> None:
        """Set a variable; where that may not happen, another value than it has is not known."""
        if isinstance(value, list) and len(value) > MOST:
            raise InvalidFileError([f"{self.name}: more than {MOST:,} words in {name}: give the command that trains"])
        if not sure and self.scope.variables.get(name, "") != value:
            value = UNKNOWN
        self.scope.variables[name] = value
        self.exported |= {name} if self.exports else set()
        self.lines[name] = [token.line for token in where][:1]


def _leading_assignments(words: Sequence[Token]) -> Sequence[Token]:
    for place, token in enumerate(words):
        if token.words is None and not (_ASSIGNED.fullmatch(token.text) or _ITEM.fullmatch(token.text)):
            return words[:place]
    return words


def _is_further(before: Sequence[str], name: str) -> bool:
    """Tell whether a word of a variable that is never set stands for further words, and is no flag's value."""
    value = bool(before) and before[-1].startswith("-") and "=" not in before[-1]
    return bool(before) and (not value or _OWN_WORDS.search(name) is not None)
