"""Names that stand in no list: what a name that looks like a known one may be guessed to mean, and what it may not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from memplan.catalog.catalog import Catalog
from memplan.errors import CannotAnswerError, normalised_name, printable

_TOKEN = re.compile(r"\d+x\d+(?:\.\d+)?[bm](?![a-z])|a?\d+(?:\.\d+)?[bm](?![a-z0-9])|[a-z]+|\d+")
_SIZE = re.compile(r"(?:\d+x)?a?\d+(?:\.\d+)?[bm]")

_ENDING = re.compile(
    "instruct|it|chat|base|hf|pt|sft|dpo|rlhf|bnb|gptq|awq|int|fp|bf|gguf|mlx|nf|w|a|v|bit|k|m|dynamic|quantized|unsloth|preview"
    "|latest|text|only|dwq|exl|marlin|sym|asym|channel|tensor|per|static|block|[0-9]+"
)
"""Words that say how a model was tuned or stored, and nothing of its shapes."""

_OTHER_PART = re.compile(
    "vl|vlm|vision|visual|omni|audio|speech|multimodal|image|video|ocr|llava|clip|siglip|moe|embed|embeddings?|rerank|reranker"
    "|reward|rm|prm|classifier|guard|draft|eagle|medusa|mtp|diffusion|mamba|hybrid|pruned?|minitron|depth|layers?|upscaled"
    "|merged|franken|passthrough|solar|nano|half|tiny|random"
)
"""Words of models whose shapes are others than those of the model that their name goes on to mention."""


def tokens(name: str) -> tuple[str, ...]:
    """Return a name without its organisation as lower-case words, sizes and numbers.

    Example:
        >>> tokens("meta-llama/Llama-3.1-8B-Instruct")
        ('llama', '3', '1', '8b', 'instruct')
    """
    return tuple(_TOKEN.findall(name.rsplit("/", 1)[-1].lower().replace("_", "-")))


def guessed_name(text: str, catalog: Catalog) -> str | None:
    """Return the catalog entry whose shapes a name seems to mean, or None.

    A name is that of a known model with words before or after it, such as ``-Instruct`` or a fine-tune's own. The longest
    known name counts. No guess is made where the words left over state another size or another family, or that there
    are other parts than a text model; nor from a name without a size, unless the words after it say nothing of shapes.
    """
    given = tokens(text)
    known = known_names(catalog)
    words = {name[0] for name in known if name and not name[0].isdigit()}
    found = sorted(((len(name), name) for name in known if name and _at(given, name) is not None), reverse=True)
    for length, name in found:
        start = _at(given, name)
        assert start is not None
        rest = (*given[:start], *given[start + length :])
        plain = all(_ENDING.fullmatch(word) for word in rest if word != "meta")
        if plain and (start == 0 or given[:start] == ("meta",)):
            return known[name]
        sized = any(_SIZE.fullmatch(word) for word in name)
        other = any(_SIZE.fullmatch(word) or _OTHER_PART.fullmatch(word) or word in words - set(name) for word in rest)
        return known[name] if sized and not other else None
    return None


def known_names(catalog: Catalog) -> Mapping[tuple[str, ...], str]:
    """Return the words of every name, alias and id -> the entry; words that several entries share are left out."""
    names: dict[tuple[str, ...], set[str]] = {}
    spellings = ((name, name) for name in catalog.models)
    lists = (catalog.models.listed(key) for key in ("aliases", "hf_id", "ids", "mirrors"))
    for text, name in chain(spellings, *lists):
        names.setdefault(tokens(text), set()).add(name)
    return {words: owners.pop() for words, owners in names.items() if len(owners) == 1}


def _at(given: tuple[str, ...], name: tuple[str, ...]) -> int | None:
    """Return where a name's words begin in those that were given, or None."""
    starts = (n for n in range(len(given) - len(name) + 1) if given[n : n + len(name)] == name)
    return next(starts, None)


def refuse_unmodelled(text: str, catalog: Catalog) -> None:
    """Refuse a name of a family that memplan does not model.

    Raises:
        CannotAnswerError: With what it is that is not modelled.
    """
    for family, reason in _unmodelled(catalog, text):
        raise CannotAnswerError(f"{printable(text)!r}: {family} is not modelled: {reason}")


def _unmodelled(catalog: Catalog, text: str) -> Iterator[tuple[str, str]]:
    name = normalised_name(text.rsplit("/", 1)[-1])
    given = set(tokens(text))
    for key, row in catalog.tables.unmodelled.items():
        begins = any(name.startswith(normalised_name(start)) for start in row.begins)
        if begins or given & set(row.words):
            yield row.title or key, row.reason
