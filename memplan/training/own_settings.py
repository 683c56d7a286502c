"""Settings as a stack's own users write them: memplan's key and value in the stack's words."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.catalog.stacks import Stack
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import setting_text


@dataclass(frozen=True, slots=True)
class OwnSetting:
    """One setting in the words of a stack."""

    setting: str  # As ``--set`` takes it
    own_key: str | None  # What the stack calls the key; None where nothing of the stack does this
    own_value: str | None  # The value that it takes there

    @property
    def text(self) -> str:
        """The setting as a line of the stack's own configuration, or nothing."""
        mark = "=" if str(self.own_key).isupper() else ": "  # of a variable of the environment
        return "" if self.own_key is None else f"{self.own_key}{mark}{self.own_value}"


def own_settings(stack: Stack, settings: Iterable[tuple[str, Any]]) -> tuple[OwnSetting, ...]:
    """Return settings in the words of a stack, in their order; one may take several keys there.

    Args:
        settings: Keys of a training config, with dots, and their values.

    Example:
        >>> from memplan.library.lookup import open_catalog
        >>> own_settings(open_catalog(None).stack("trl"), [("micro_batch_size", 1)])[0].text
        'per_device_train_batch_size: 1'
    """
    return tuple(own for key, value in settings for own in _in_own_words(stack, key, value))


def with_words(stack: Stack, writes: Mapping[str, Any]) -> Stack:
    """Return a stack with the words that its files have in a version of their own, where a trainer's mapping says so."""
    return replace(stack, values={**stack.values, **writes.get("words", {})})


def is_settable(stack: Stack, settings: Iterable[tuple[str, Any]]) -> bool:
    """Tell whether a stack has words for all of some settings; one without keys of its own takes memplan's."""
    return not stack.keys or all(own.own_key is not None for own in own_settings(stack, settings))


def _in_own_words(stack: Stack, key: str, value: Any) -> Iterator[OwnSetting]:
    text = setting_text(value)
    own: Mapping[Any, str] = {stack.keys[key]: text} if key in stack.keys else {}
    if key in stack.values:
        own = stack.values[key].get(text, {})
    for own_key, own_value in own.items() if own else ((None, None),):
        yield OwnSetting(f"{key}={text}", own_key, own_value)
