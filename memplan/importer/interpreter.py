"""The one interpreter of mappings: keys of a trainer's file in, memplan's keys out, with who said what."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from memplan.errors import match_hint, printable, shown_value
from memplan.importer.reading import DEFAULTED, MODEL, OVERRIDDEN, Reading, Refusal, Result, UsedKey, need_of, target
from memplan.importer.shell.expansions import REFERENCE
from memplan.importer.sources.conditions import LARGEST, as_number, holds, is_on, truth, word
from memplan.importer.sources.given_keys import MISSING, Expression, GivenKeys
from memplan.importer.sources.module_patterns import PATTERN_KINDS, parameter_pattern, selected_linears

COUNTS = ("micro_batch_size", "sequence_length", "gradient_accumulation_steps", "adapter.rank", "parallel.replicate", "method.rollout.generations", "let.global_batch_size", "let.layers_per_virtual_stage")  # fmt: skip
"""Results of which there is at least one."""
FEW = 6
"""Values that a message lists; of more it names the nearest."""

ALL_LINEAR = ("all", "all-linear", "all_linear")
"""Words for all linear layers, beside which other modules may be named."""

ARITHMETIC = ("product", "quotient", "sum", "smallest", "multiple")

PROGRAM = "$program"
"""The program and subcommands of a command line, which say as much as its flags do."""


def follow(reading: Reading, rules: Sequence[Mapping[str, Any]], keys: GivenKeys, rank: int) -> None:
    """Apply rules to the keys of one source, one after the other.

    Args:
        reading: What is known so far, added to.
        rank: How strongly its keys count.
    """
    for rule in rules:
        _Step(reading, rule, keys, rank).run()


def is_unknown(value: Any) -> bool:
    """Tell whether nobody can tell a value from a file: what a shell, OmegaConf or a program would put in."""
    return isinstance(value, Expression) or (isinstance(value, str) and REFERENCE.search(value) is not None)


def _named_in(path: str) -> bool:
    """Tell whether a path of which a folder is not known ends with a plain name."""
    folder, _, name = path.rpartition("/")
    return bool(folder) and re.fullmatch(r"[\w.-]+", name) is not None


class _Step:
    """One rule on its way."""

    def __init__(self, reading: Reading, rule: Mapping[str, Any], keys: GivenKeys, rank: int) -> None:
        self.reading, self.rule, self.keys, self.rank = reading, rule, keys, rank
        self.seen: list[str] = []
        self.from_results = DEFAULTED

    def lookup(self, name: str) -> Any:
        """Return a key's value, noting that it was looked at; with ``$`` a result's."""
        if name.startswith("$"):
            result = self.reading.results.get(target(name[1:]))
            if result is not None or (name == PROGRAM and name[1:] in self.reading.inputs):
                self.from_results = max(self.from_results, self.rank if result is None else result.rank)
            return self.reading.result(name[1:])
        value = self.keys.value(name)
        if value is not MISSING:
            place = (self.keys.source(name).name, name)
            if place not in self.reading.used:
                self.reading.used[place] = UsedKey(name, place[0], self.keys.line(name), value)
            self.seen.append(name)
        return value

    def run(self) -> None:
        rule = self.rule
        conditions = holds(rule.get("when", {}), self.lookup)
        if rule.get("unless") and holds(rule["unless"], self.lookup):
            conditions = False
        names = rule.get("key", [])
        names = [names] if isinstance(names, str) else names
        given = next((name for name in names if self.lookup(name) is not MISSING), None)
        if not conditions:
            return
        if names and given is None:
            null = rule.get("if_null") if self.keys.has(names[0]) else None
            if isinstance(null, Mapping):
                self._null(names[0], null)
            elif null is None and "default" in rule:
                self._default(names[0])
            return
        self._apply(given)

    def _default(self, key: str) -> None:
        value = self.rule["default"]
        why = self.rule.get("why", f"the trainer's default where {key} is not given")
        results = value if isinstance(value, Mapping) else {self.rule["to"]: value}
        for name, one in results.items():
            self._set(name, one, DEFAULTED, key, why)

    def _apply(self, key: str | None) -> None:
        rule = self.rule
        if "need" in rule:
            self.reading.need(rule["need"])
        elif "refuse" in rule and "table" not in rule:
            self._refuse(key, rule["refuse"])
        elif any(operation in rule for operation in ARITHMETIC):
            self._arithmetic(key)
        elif "join" in rule:
            parts = [str(value) for name in rule["join"] if (value := self.lookup(name)) is not MISSING]
            self._state(rule["to"], "-".join(parts), key)
        elif "append" in rule:
            self._append(rule["to"], rule["append"] if isinstance(rule["append"], list) else [rule["append"]], key)
        elif "set" in rule:
            for name, value in rule["set"].items():
                self._state(name, value, key)
        elif "program" in rule:
            if word_of := re.fullmatch(rule["program"], str(self.lookup(PROGRAM))):
                self._state(rule["to"], word_of[1], key)
        elif "value" in rule:
            self._state(rule["to"], rule["value"], key)
        elif "change" in rule:
            self._default(rule["change"])
        elif key is not None:
            self._from_key(key)

    def _from_key(self, key: str) -> None:
        rule, value = self.rule, self.keys.value(key)
        if is_unknown(value) and not (rule.get("to") == MODEL and _named_in(value)):
            said = f"{key} is {printable(value, 40)!r} in {self.keys.where(key)}"
            named = "to" in rule and not rule["to"].startswith("let.")
            self.reading.need(f"{need_of(rule['to']) if named else f'the value of {key}'}: {said}")
            return
        if "table" in rule:
            self._from_table(key, value)
        elif "to" in rule:
            converted = self._converted(key, value)
            if converted is not MISSING:
                self._state(rule["to"], converted, key)

    def _from_table(self, key: str, value: Any) -> None:
        table = self.rule["table"]
        if isinstance(value, Mapping):
            value = is_on(value)
        by_word = {word(name): meaning for name, meaning in table.items()}
        if isinstance(value, list) and value and all(by_word.get(word(item), MISSING) is None for item in value):
            return  # each of several changes nothing
        meaning = next((by_word[name] for name in (word(value), truth(value), "*") if name in by_word), MISSING)
        if meaning is MISSING:
            known = [word(name) for name in table]
            few = f", modelled are {', '.join(known)}" if len(known) <= FEW else ""
            text = self.rule.get("refuse", f"{shown_value(value, 60)}{few}")
            self._refuse(key, f"{text}{'' if few else match_hint(word(value), known)}")
        elif isinstance(meaning, Mapping):
            self._meant(key, meaning)
        elif meaning is not None:
            self._state(self.rule["to"], meaning, key)

    def _null(self, key: str, meaning: Mapping[str, Any]) -> None:
        """Do what a key stands for that is there without a value, where that is not what it is without the key."""
        source = self.keys.source(key).name
        self.reading.used.setdefault((source, key), UsedKey(key, source, self.keys.line(key), None))
        self._meant(key, meaning)

    def _meant(self, key: str, meaning: Mapping[str, Any]) -> None:
        for name, one in meaning.items():
            if name == "refuse":
                self._refuse(key, one)
            else:
                self._state(name, one, key)

    def _converted(self, key: str, value: Any) -> Any:
        kind = self.rule.get("as", "text")
        if kind == "flag":
            return is_on(value)
        if self.rule["to"] == MODEL and value is True and self.keys.form == "argv":  # its variable is set to nothing
            self.reading.need(f"{need_of(MODEL)}: {key} has no value in {self.keys.where(key)}")
            return MISSING
        if self.rule["to"] == MODEL and not isinstance(value, str):
            self._problem(key, "a model's name", value)
            return MISSING
        if kind in PATTERN_KINDS:
            return self._patterns(key, value, kind)
        if kind in ("list", "targets"):
            return self._list(key, value, kind)
        if kind in ("whole", "number"):
            number = as_number(value)
            least = 1 if self.rule["to"] in COUNTS else -LARGEST
            if number is None or (kind == "whole" and number != int(number)) or number < least:
                wanted = "a whole number" if kind == "whole" else "a number"
                self._problem(key, f"{wanted}, at least 1" if least == 1 else wanted, value)
                return MISSING
            return int(number) if kind == "whole" else number
        if self.rule.get("as") == "text":  # a file's number or list is no text yet: moe_layer_freq is 1, or [0, 1]
            return str(value)
        if "match" in self.rule:
            result = re.fullmatch(self.rule["match"], str(value))
            return result[1] if result else str(value)
        return value if isinstance(value, bool | int | float | dict | list) else str(value)

    def _problem(self, key: str, wanted: str, value: Any) -> None:
        self.reading.problems.append(f"{self.keys.where(key)}: expected {wanted}, got {shown_value(value, 60)}")

    def _list(self, key: str, value: Any, kind: str) -> Any:
        """Return names as a list; adapters' targets as what modules' names end with, all linear layers by one word."""
        items = value if isinstance(value, list) else re.split(r"[,\s]+", str(value))
        names = [str(item) for item in items if str(item)]
        if names and names[0].startswith("[") and names[-1].endswith("]") and not isinstance(value, list):
            names = [name.strip("[]'\"") for name in names]  # a list as text, such as "[mlp moe_act]"
        if kind == "list":
            return names
        if any(re.search(r"[*()\[\]|\\^$+?{}]", name) for name in names):
            selected = selected_linears(value) if isinstance(value, str) else None
            if selected is None:
                self._refuse(
                    key, "adapters on modules that a pattern selects, but for one of linear layers alike in all layers"
                )
            self._state("adapter.vision", False, key)  # patterns that select modules of a tower are refused
            return selected or MISSING
        if any(part.isdigit() for name in names for part in name.split(".")):
            self._refuse(key, "adapters on some layers alone; q_proj without a layer's number is that of all layers")
            return MISSING
        parts = [name.rpartition(".") for name in names]
        names = [f"{path}{dot}{self.rule.get('names', {}).get(last, last)}" for path, dot, last in parts]
        others = [name for name in names if name not in ALL_LINEAR]
        return names if len(others) == len(names) else ["all-linear", *others]

    def _patterns(self, key: str, value: Any, kind: str) -> Any:
        """Return what says which parameters train as regular expressions, behind those that other keys have said."""
        items = [value] if kind == "regex" else self._list(key, value, "list")
        self._append(self.rule["to"], [parameter_pattern(str(item), kind) for item in items], key)
        return MISSING

    def _arithmetic(self, key: str | None) -> None:
        """Set a product, quotient or sum of terms, their smallest, or the next multiple of the second where the first is none.

        Without its first term it is none; a quotient or sum without any of them too.
        """
        operation = next(name for name in ARITHMETIC if name in self.rule)
        values = [self._term(term) for term in self.rule[operation]]
        if operation == "smallest":
            values = [min([value for value in values if value is not None], default=None)]
        if values[0] is None or (operation in ("quotient", "sum") and None in values):
            return
        numbers = [1 if value is None else value for value in values]
        if operation == "quotient":
            divisor = prod(numbers[1:])
            if "exact" in self.rule and numbers[0] % divisor:
                self._problem(
                    self.seen[0], f"a divisor of {numbers[0] / prod(numbers[1:-1]):g} {self.rule['exact']}", numbers[-1]
                )
                return
            total = -(-numbers[0] // divisor) if self.rule.get("up") else numbers[0] // divisor
        elif operation == "multiple":
            if numbers[0] % numbers[1] == 0:
                return
            total = -(-numbers[0] // numbers[1]) * numbers[1]
        else:
            total = prod(numbers) if operation == "product" else sum(numbers)
        self._state(self.rule["to"], max(int(total), self.rule.get("least", 0)), key)

    def _term(self, term: int | str) -> int | float | None:
        """Return the number behind a term; a number itself, a key or a result."""
        if isinstance(term, int):
            return term
        value = self.lookup(term)
        number = None if value is MISSING else as_number(value)
        return number or None

    def _refuse(self, key: str | None, why: str) -> None:
        name = key or next(iter(self.seen), "")
        value = self.keys.value(name) if name else ""
        value = None if value is MISSING else value  # a key without a value
        source = self.keys.source(name).name if name else self.keys.name
        refusal = Refusal(name, source, self.keys.line(name) if name else 1, value, why)
        if refusal not in self.reading.refusals:
            self.reading.refusals.append(refusal)

    def _append(self, name: str, added: Sequence[Any], key: str | None) -> None:
        earlier = self.reading.results.get(target(name))
        items = earlier.value if earlier is not None and isinstance(earlier.value, list) else []
        if new := [item for item in dict.fromkeys(added) if item not in items]:
            self._state(name, [*items, *new], key)

    def _state(self, name: str, value: Any, key: str | None) -> None:
        """Set a result that keys, or results of theirs, say."""
        keys = [key] if key is not None else list(self.seen)
        rank = OVERRIDDEN if self.rule.get("overrides") else self.rank if keys else self.from_results
        why = self.rule.get("why", "")
        self._set(name, value, rank, keys[0] if keys else "", why, keys)

    def _set(self, name: str, value: Any, rank: int, key: str, why: str, keys: Sequence[str] = ()) -> None:
        full, results = target(name), self.reading.results
        if full in results and results[full].rank > rank:
            return
        results[full] = Result(value, rank, key, self.keys.source(key).name if key else self.keys.name, why)
        effect = f"{full.removeprefix('training.')} = {word(value) if isinstance(value, bool) else value}"
        if not isinstance(value, list):  # other keys say parts of a list
            self._forget(full, effect)
        for one in keys:
            effects = self.reading.used[self.keys.source(one).name, one].effects
            if effect not in effects:
                effects.append(effect)

    def _forget(self, full: str, effect: str) -> None:
        """Take what a result was before from the keys that said it."""
        said = f"{full.removeprefix('training.')} = "
        for used in self.reading.used.values():
            used.effects[:] = [one for one in used.effects if one == effect or not one.startswith(said)]
