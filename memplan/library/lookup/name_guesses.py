"""Names that stand in no list: what a name that looks like a known one may be guessed to mean, and what it may not."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from memplan.catalog.catalog import Catalog
from memplan.errors import CannotAnswerError, printable

_TOKEN = re.compile(
    r"\d+x\d+(?:\.\d+)?[bm](?![a-z])|a?\d+(?:\.\d+)?[bm](?![a-z0-9])|(?:int|fp|bf|nf|mxfp|nvfp)\d+|w\d+a\d+|\d-?bit|\d+k(?![a-z])"
    r"|v\d+(?:\.\d+)*|[a-z]+|\d+"
)
_MONTH = re.compile(r"2[3-9](?:0[1-9]|1[0-2])")
_SIZE = re.compile(r"(?:\d+x)?a?\d+(?:\.\d+)?[bm]")
_VERSION = re.compile(r"\d+$|v\d")
_NUMBER, _OWN_VERSION = re.compile(r"\d+$"), re.compile(r"v\d")
"""A number, which may be a family's version; and a word like ``v0.2``, a fine-tune's own where no name of the family has any."""
_DECIMAL = re.compile(r"(?<=[\d_-])(\d)_(\d+[bm])", re.IGNORECASE)
"""A size with an underscore for its point, as components are called: ``qwen3_0_6b``."""

_ENDING = re.compile(
    "instruct|it|chat|base|hf|pt|sft|dpo|rlhf|bnb|gptq|awq|gguf|mlx|mcore|dynamic|quantized|unsloth|preview|latest|text|only|dwq|exl"
    r"|marlin|sym|asym|channel|tensor|per|static|block|(?:int|fp|bf|nf|mxfp|nvfp)\d+|w\d+a\d+|\d-?bit|\d+k|\d{4}"
)
"""Words that say how a model was tuned or stored, and nothing of its shapes."""

_OTHER_PART = re.compile(
    "assistant|vl|vlm|vision|visual|omni|audio|speech|multimodal|image|video|ocr|llava|clip|siglip|moe|embed|embeddings?|rerank|reranker"
    "|reward|rm|prm|classifier|guard|draft|eagle|medusa|mtp|diffusion|mamba|hybrid|pruned?|minitron|depth|layers?|upscaled"
    "|merged|franken|passthrough|solar|nano|half|tiny|random|dflash|dflare|domino|dspark|vispec|switch"
)
"""Words of models whose shapes are others than those of the model that their name goes on to mention."""


def tokens(name: str) -> tuple[str, ...]:
    """Return a name without its organisation as lower-case words, sizes and numbers.

    Example:
        >>> tokens("meta-llama/Llama-3.1-8B-Instruct"), tokens("Qwen2-1___5B")
        (('llama', '3', '1', '8b', 'instruct'), ('qwen', '2', '1.5b'))
    """
    plain = name.rsplit("/", 1)[-1].lower().replace(POINT, ".").replace("_", "-")
    return tuple(_TOKEN.findall(plain))


POINT = "___"
"""What ModelScope's folders have for a point (get_model_masked_directory in modelscope/hub/utils/utils.py)."""


def sizes(name: str) -> tuple[str, ...]:
    """Return the sizes that a name states.

    Example:
        >>> sizes("llama3-3B"), sizes("Qwen3-30B-A3B"), sizes("gpt2")
        (('3b',), ('30b', 'a3b'), ())
    """
    return tuple(word for word in tokens(name) if _SIZE.fullmatch(word))


def guessed_name(text: str, catalog: Catalog) -> str | None:
    """Return the catalog entry whose shapes a name seems to mean, or None.

    First the longest known name that is left when words such as ``-Instruct`` are taken off counts, then the longest that
    stands in the name, as in a fine-tune's, then the longest whose words stand in it in their order. No such guess is made
    where the other words state another size, where another family's stands behind the name, or where they say that there are
    other parts than a text model; nor from a name without a size, or the month of a release. Of 16,849 published ids
    (hf_models.json of llmfit 1.1.17) 3,642 that no list has, and whose shapes are known, are guessed by these rules, but for
    the month's; 2 of the guesses are wrong.
    """
    known = _known(catalog)
    spellings = dict.fromkeys((text, _DECIMAL.sub(r"\1.\2", text)))
    return next((known.entries[name] for given in spellings if (name := _guess(tokens(given), known))), None)


class _Families(NamedTuple):
    """First words of names in the catalog; those of copies may be any."""

    words: frozenset[str]
    versioned: frozenset[str]  # Of names some of which have a word like ``v0.2``


class _Known(NamedTuple):
    """Names in the catalog."""

    entries: Mapping[tuple[str, ...], str]  # Words of a name -> the entry
    longest_first: Sequence[tuple[str, ...]]
    families: _Families


@lru_cache(maxsize=1)
def _known(catalog: Catalog) -> _Known:
    """Return the names in a catalog, which thousands of texts are split for: once, as one name is asked for several times."""
    entries = known_names(catalog)
    return _Known(entries, sorted(entries, key=len, reverse=True), _families(catalog))


def _families(catalog: Catalog) -> _Families:
    own = [*catalog.models, *(text for text, _ in catalog.models.listed("hf_id"))]
    lists = (catalog.models.listed(key) for key in ("aliases", "ids"))
    names = [tokens(text) for text in (*own, *(text for text, _ in chain(*lists)))]
    versioned = (words[0] for words in names[: len(own)] if any(map(_OWN_VERSION.match, words)))
    return _Families(frozenset(words[0] for words in names if words), frozenset(versioned))


def _guess(given: tuple[str, ...], known: _Known) -> tuple[str, ...] | None:
    """Return the known name that words seem to mean, or None: of a family's words none may stand beside it but its own."""
    _, longest_first, families = known
    begun = [(name, rest) for name in longest_first if (rest := _left_over(given, name)) is not None]
    for name, rest in begun:
        if all(_ENDING.fullmatch(word) for word in rest):
            return name
    name = next((name for name in longest_first if name[0] in given and _at(given, name) is not None), ())
    start = _at(given, name) or 0
    before, after = given[:start], given[start + len(name) :]
    if (
        _is_sized(name)
        and not any(map(_is_other, before))
        and not any(_is_other(w, families.words - set(name)) for w in after)
    ):
        return name
    for name, rest in begun:
        version = _VERSION if name[0] in families.versioned else _NUMBER
        others = families.words - set(name)
        if _is_sized(name) and not any(_is_other(word, others) or version.match(word) for word in rest):
            return name
    return None


def _is_sized(name: tuple[str, ...]) -> bool:
    """Tell whether a known name says a size, or the month of a release behind a model's name, as Mistral's do."""
    return any(_SIZE.fullmatch(word) for word in name) or (len(name) > 2 and any(map(_MONTH.fullmatch, name)))


def _is_other(word: str, families: Collection[str] = ()) -> bool:
    """Tell whether a word says that a model has other shapes than the one that its name goes on to mention."""
    return bool(_SIZE.fullmatch(word) or _OTHER_PART.fullmatch(word)) or word in families


def known_names(catalog: Catalog) -> Mapping[tuple[str, ...], str]:
    """Return the words of every name, alias and id -> the entry; words that several entries share are left out."""
    names: dict[tuple[str, ...], set[str]] = {}
    spellings = ((name, name) for name in catalog.models)
    lists = (catalog.models.listed(key) for key in ("aliases", "hf_id", "ids", "mirrors", "tuned"))
    for text, name in chain(spellings, *lists):
        names.setdefault(tokens(text), set()).add(name)
    return {words: owners.pop() for words, owners in names.items() if words and len(owners) == 1}


def _left_over(given: tuple[str, ...], name: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the words besides a name's own, which have to begin it in their order; None where they do not."""
    words = given[1:] if given[:1] == ("meta",) else given
    if words[:1] != name[:1]:
        return None
    rest, left = [], list(name)
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            rest.append(word)
    return None if left else tuple(rest)


def _at(given: tuple[str, ...], name: tuple[str, ...]) -> int | None:
    """Return where a name's words begin in those that were given, or None."""
    starts = (n for n in range(len(given) - len(name) + 1) if given[n : n + len(name)] == name)
    return next(starts, None)


def refuse_unmodelled(text: str, catalog: Catalog) -> None:
    """Refuse a name of a family that memplan does not model.

    Raises:
        CannotAnswerError: With what it is that is not modelled.
    """
    for family, reason in _unmodelled(text, catalog):
        script = "memplan run executes a script that trains it"
        ids = (one for key in ("hf_id", "ids") for one, _ in catalog.models.listed(key))
        release = next((one for one in ids if one.lower() == f"{text}-hf".lower()), "")
        other = f", and {release} is the release that transformers' own code runs" if release else ""
        raise CannotAnswerError(f"{printable(text)!r}: {family} is not modelled: {reason}; {script}{other}")


def _unmodelled(text: str, catalog: Catalog) -> Iterator[tuple[str, str]]:
    given = tokens(text)
    known = _guess(given, _known(catalog)) or ()
    for row in catalog.tables.unmodelled.values():
        starts = [start for start in map(tokens, row.begins) if given[: len(start)] == start]
        begins = any(known[: len(start)] != start for start in starts)  # a model of them that is known is modelled
        if begins or (set(given) - set(known)) & set(row.words):
            yield row.title, row.reason
