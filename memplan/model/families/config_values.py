"""A released config as checked values; problems are gathered and raised together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.families.unread_keys import HARMLESS_KEYS, NOTED_KEYS, changes_arithmetic, is_neutral, memory_reason
from memplan.model.spec import Activation

MAXIMUM_DIMENSION = 2**24
MAXIMUM_LAYERS = 10_000
MAXIMUM_POSITIONS = 2**40
KEYS_SHOWN = 12  # Of those that are ignored

INHERITED_KEYS = ("tie_word_embeddings",)
"""Keys that a config states once for all its parts."""
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-new",
    "gelu_fast": "gelu-fast",
    "gelu_pytorch_tanh": "gelu-tanh",
    "quick_gelu": "quick-gelu",
    "relu": "relu",
}


class ConfigValues:
    """Reads keys of one config. A bad value is noted and a harmless one returned in its place.

    Args:
        source: File or catalog entry, for messages.
        locate: Turns a key into ``file:line: key``; by default ``source: key``.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        name: str,
        source: str,
        family: str,
        locate: Callable[[str], str] | None = None,
    ) -> None:
        self.name, self.source, self.family = name, source, family
        self._config = config
        self._locate = locate or (lambda key: f"{source}: {key}")
        self._read: set[str] = set()
        self._problems: list[str] = []
        self._refused: list[str] = []
        self._notes: list[str] = []

    def integer(
        self, *keys: str, default: int | None = None, minimum: int = 1, maximum: int = MAXIMUM_DIMENSION
    ) -> int:
        """Return the integer under the first of ``keys`` that is present; all spellings must agree.

        Args:
            keys: Spellings, the preferred one first.
            default: What an absent key or a null means; without it the key is required.
            minimum: Smallest allowed value.
            maximum: Largest allowed value.
        """
        given = self._given(keys)
        if not given:
            if default is None:
                self.problem(keys[0], "required key is missing")
            return minimum if default is None else default
        values = [self._checked(key, value, minimum, maximum) for key, value in given]
        if any(value != values[0] for value in values):
            spelled = ", ".join(f"{key} {value!r:.40}" for key, value in given)
            self.problem(keys[0], f"spelled in two ways that disagree: {spelled}")
        return values[0]

    def _checked(self, key: str, value: Any, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.problem(key, f"expected an integer, got {value!r:.60}")
        elif not minimum <= value <= maximum:
            shown = value if abs(value) < 10**18 else "a number far beyond it"
            self.problem(key, f"expected an integer from {minimum:,} to {maximum:,}, got {shown}")
        else:
            return value
        return minimum

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return the boolean under the first of ``keys`` that is present, else ``default``."""
        for key, value in self._given(keys)[:1]:
            if isinstance(value, bool):
                return value
            self.problem(key, f"expected true or false, got {value!r:.60}")
        return default

    def number(self, *keys: str, default: float, maximum: float = 1.0) -> float:
        """Return the finite number from 0 to ``maximum`` under the first of ``keys`` that is present."""
        for key, value in self._given(keys)[:1]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.problem(key, f"expected a number, got {value!r:.60}")
            elif not (-1e300 < value < 1e300 and isfinite(value) and 0 <= value <= maximum):
                self.problem(key, f"expected a number from 0 to {maximum:g}, got {value!r:.40}")
            else:
                return float(value)
        return default

    def dropout(self, *keys: str, default: float = 0.0) -> float:
        """Return the largest dropout probability under any of ``keys``."""
        return max(self.number(key, default=default) for key in keys)

    def cap(self, key: str, default: float) -> float:
        """Return a soft cap: a null says that there is none, which is 0.0, and an absent key means ``default``."""
        self._read.add(key)
        if key not in self._config:
            return default
        return self.number(key, default=0.0, maximum=1e9)

    def text(self, key: str, default: str) -> str:
        """Return the text under ``key``, or ``default`` where it is absent or null."""
        for _, value in self._given((key,)):
            if isinstance(value, str):
                return value
            self.problem(key, f"expected a text, got {value!r:.60}")
        return default

    def activation(self, *keys: str, default: str = "silu") -> Activation:
        """Return the activation function that the first of ``keys`` that is present names."""
        text = default
        for key, value in self._given(keys)[:1]:
            if not isinstance(value, str):
                self.problem(key, f"expected the name of an activation function, got {value!r:.60}")
            elif value not in ACTIVATIONS:
                self.refuse(key, f"the activation function {value!r:.40} is not modelled ({', '.join(ACTIVATIONS)})")
            else:
                text = value
        return ACTIVATIONS[text]

    def integers(self, key: str, length: int | None = None) -> tuple[int, ...] | None:
        """Return the list of integers under ``key``, or None where it is absent or null."""
        for _, value in self._given((key,)):
            if not isinstance(value, list) or any(
                isinstance(item, bool) or not isinstance(item, int) for item in value
            ):
                self.problem(key, f"expected a list of integers, got {value!r:.60}")
            elif length is not None and len(value) < length:
                self.problem(key, f"expected {length} integers, got {len(value)}")
            else:
                return tuple(value)
        return None

    def part(self, key: str, family: str) -> ConfigValues:
        """Return the values of the part of a config that is nested under ``key``, which ``family`` reads."""
        given = self._given((key,))
        if given and not isinstance(given[0][1], dict):
            self.problem(key, f"expected an object with keys, got {given[0][1]!r:.40}")
        return ConfigValues(self.mapping(key), self.name, self.source, family, self._locate)

    def text_part(self, family: str) -> ConfigValues:
        """Return the values of a config's text model, which ``family`` reads: nested, or the config's own.

        A key that the whole states for all its parts, as one that ties embeddings, counts before the part's.
        """
        text = self.part("text_config", family)
        tied = {key: self._config[key] for key in INHERITED_KEYS if key in self._config}
        own = {key: value for key, value in self._config.items() if not key.endswith("_config")}
        text._config = dict(text._config) | tied if text._config else own
        self._read.update(INHERITED_KEYS if "text_config" in self._config else own)
        return text

    def square(self, *keys: str) -> None:
        """Read a pair of equal numbers under any of ``keys`` as one number."""
        pairs = {key: self._config.get(key) for key in keys}
        self._config = {
            **self._config,
            **{key: pair[0] for key, pair in pairs.items() if isinstance(pair, list) and pair and pair == pair[:1] * 2},
        }

    def ignore(self, *keys: str) -> None:
        """Count keys as read that change nothing."""
        self._read.update(keys)

    def take(self, part: ConfigValues) -> None:
        """Add the problems, refusals and notes of a part that has been read."""
        try:
            part.finish()
        except InvalidFileError as error:
            self._problems += error.problems
        except CannotAnswerError as error:
            self._refused.append(str(error))
        self._notes += part.notes()

    @property
    def keys(self) -> Mapping[str, Any]:
        """All keys of the config, unchecked, and the family as ``model_type``."""
        return {**self._config, "model_type": self.family}

    def layer_types(self, count: int, *kinds: str) -> None:
        """Refuse layers that are neither full nor windowed attention nor of ``kinds``; that they are not ``count`` is a problem."""
        for key, value in self._given(("layer_types",)):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                self.problem(key, f"expected a list of names, got {value!r:.60}")
                continue
            others = sorted({item for item in value if item not in ("full_attention", "sliding_attention", *kinds)})
            if others:
                self.refuse(key, f"layers of type {', '.join(others):.80} are not modelled")
            if len(value) != count:
                self.problem(key, f"expected {count} names, got {len(value)}")

    def has(self, key: str) -> bool:
        """Tell whether ``key`` is there, be it a null."""
        return key in self._config

    def mapping(self, *keys: str) -> Mapping[str, Any]:
        """Return the object under the first of ``keys`` that holds one, else an empty one."""
        return next((value for _, value in self._given(keys) if isinstance(value, dict)), {})

    def expect(self, key: str, value: int) -> None:
        """Refuse a config whose ``key`` is present and is not ``value``, which the family fixes."""
        for _, given in self._given((key,)):
            if isinstance(given, bool) or given != value:
                self.refuse(key, f"is {given!r:.40}, and family {self.family!r} has {value} only")

    def only(self, key: str, *values: Any) -> None:
        """Refuse a config whose ``key`` is present and none of ``values``, which are all that the family computes."""
        for _, given in self._given((key,)):
            if given not in values:
                allowed = " or ".join(repr(value) for value in values)
                self.refuse(key, f"is {given!r:.40}, and family {self.family!r} is modelled with {allowed} only")

    def divides(self, divisor_key: str, divisor: int, key: str, value: int) -> None:
        """Note a problem unless ``divisor`` divides ``value``."""
        if value % divisor:
            self.conflict(divisor_key, f"{divisor} does not divide {key}, which is {value}")

    def problem(self, key: str, text: str) -> None:
        """Note that the value under ``key`` is wrong."""
        self._problems.append(f"{self._locate(key)}: {text}")

    def conflict(self, key: str, text: str) -> None:
        """Note that values do not go together, unless one was wrong already and stands replaced."""
        if not self._problems:
            self.problem(key, text)

    def refuse(self, key: str, text: str) -> None:
        """Note that ``key`` asks for something that memplan does not model."""
        self._refused.append(f"{self._locate(key)}: {text}")

    def note(self, text: str) -> None:
        """Add a sentence to the model's notes."""
        self._notes.append(text)

    def finish(self) -> None:
        """Raise what was gathered.

        Raises:
            InvalidFileError: Some values are wrong.
            CannotAnswerError: All are sound, but some ask for what memplan does not model.
        """
        if self._problems:
            raise InvalidFileError(self._problems)
        for key, value in self._unread():
            reason = memory_reason(key)
            if is_neutral(key, value):
                continue
            if reason:
                self.refuse(key, f"{reason} change memory, and family {self.family!r} does not model them")
            elif changes_arithmetic(key):
                self.refuse(key, f"changes what is computed, and family {self.family!r} does not model it")
            elif key in ("rope_parameters", "rope_scaling") and self._rotates_partly(value):
                self.refuse(key, f"partly rotated heads change memory, and family {self.family!r} does not model them")
        if self._refused:
            raise CannotAnswerError("\n".join(self._refused))

    @staticmethod
    def _rotates_partly(value: Any) -> bool:
        return isinstance(value, dict) and value.get("partial_rotary_factor") not in (None, 1)

    def notes(self) -> tuple[str, ...]:
        """Return the notes, with one for all unknown keys that were ignored."""
        left_out = [f"{key}: {NOTED_KEYS[key]}" for key, value in self._unread() if key in NOTED_KEYS and value]
        known = HARMLESS_KEYS | NOTED_KEYS.keys()
        unknown = [
            key
            for key, _ in self._unread()
            if key not in known and memory_reason(key) is None and not changes_arithmetic(key)
        ]
        return (*self._notes, *left_out, *ignored_keys(unknown))

    def _given(self, keys: Sequence[str]) -> list[tuple[str, Any]]:
        self._read.update(keys)
        return [(key, self._config[key]) for key in keys if self._config.get(key) is not None]

    def _unread(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self._config.items() if key not in self._read and value is not None]


def ignored_keys(keys: Sequence[str]) -> tuple[str, ...]:
    """Return at most one note, which names the keys that were ignored."""
    if not keys:
        return ()
    more = f" and {len(keys) - KEYS_SHOWN} more" if len(keys) > KEYS_SHOWN else ""
    named = ", ".join(f"{key:.60}" if key.isprintable() else ascii(key)[:60] for key in keys[:KEYS_SHOWN])
    return (f"ignored keys that memplan does not know: {named}{more}",)
