"""What a model is called, in trainers' files and in hubs, to the shapes that it means."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from memplan.catalog.catalog import Catalog
from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import is_file, is_folder, path_kind, read_text, shown_path, usable_path
from memplan.documents.strict_json import parse_object
from memplan.errors import (
    CannotAnswerError,
    InvalidFileError,
    UnknownNameError,
    match_hint,
    normalised_name,
    printable,
    same_numbers,
)
from memplan.importer.quantised_names import weights_by_name
from memplan.model.readers import is_model_file

How = Literal["catalog", "mirror", "folder", "cache", "guess"]

CONFIG, ADAPTER = "config.json", "adapter_config.json"
MOST_BASES = 3
"""Adapters upon adapters that are followed to their base."""

REPOSITORY = re.compile(r"[\w-][\w.-]{0,95}(?:/[\w-][\w.-]{0,95})?", re.ASCII)
"""An id of a repository."""


@dataclass(frozen=True, slots=True)
class ResolvedName:
    """What a model's name means."""

    target: str | Path  # Name of a catalog entry, or the file or folder to read
    # ``folder``: it lies there; ``cache``: in Hugging Face's cache on this machine; ``catalog``: an entry's name, alias
    # or published id; ``mirror``: an id known to hold the same shapes; ``guess``: by what the name looks like.
    how: How
    notes: tuple[str, ...] = ()  # What a reader of the answer has to know, one sentence each
    weights: str | None = None  # Format of the released weights where the name says that they are quantised


HUB = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*")


def without_address(text: str) -> str:
    """Return the id of a repository for its address in a hub, and any other text as it is.

    Example:
        >>> without_address("https://huggingface.co/Qwen/Qwen3-4B/tree/main"), without_address("llama-8b")
        ('Qwen/Qwen3-4B', 'llama-8b')
    """
    match = HUB.fullmatch(text)
    return match[1] if match else text


def resolve_model_name(text: str, catalog: Catalog, *, elsewhere: bool = False) -> ResolvedName:
    """Return what a name means: a folder, a cached repository, an entry, a mirror of one, or a guess, in this order.

    Args:
        elsewhere: Whether a path may lie on another machine, as one in a trainer's file may: where nothing lies there, its
            last part that is no word of a trained copy's (``checkpoint-500``) is guessed from.

    Raises:
        InvalidFileError: It is written as a path, and nothing lies there.
        CannotAnswerError: It names a family that memplan does not model.
        UnknownNameError: Nothing is known by that name, and nothing may be guessed.
    """
    given, text = text, without_drive(text) if elsewhere else text
    try:
        return _resolved(text, catalog, MOST_BASES)
    except InvalidFileError:
        from memplan.library.lookup.name_guesses import guessed_name

        elsewhere = elsewhere and path_kind(usable_path(text)) == "nothing"
        if elsewhere and (repository := _cached_repository(text)):
            return _resolved(repository, catalog, MOST_BASES)
        guess = guessed_name(_named_part(text), catalog) if elsewhere else None
        if guess is None:
            raise
        return _guessed(given, guess, catalog)


_DRIVE = re.compile(r"[A-Za-z]:(?=[\\/])")
"""How a whole path begins on Windows."""


def without_drive(text: str) -> str:
    r"""Return a path of Windows as other systems write it, and any other text as it is.

    Example:
        >>> without_drive("D:\\models\\Qwen\\Qwen3-4B"), without_drive(".\\Qwen3-4B"), without_drive("Qwen/Qwen3-4B")
        ('/models/Qwen/Qwen3-4B', './Qwen3-4B', 'Qwen/Qwen3-4B')
    """
    return _DRIVE.sub("", text, count=1).replace("\\", "/") if _DRIVE.match(text) or "\\" in text else text


_COPY = re.compile(
    r"(?:checkpoint|global_step|step|epoch)[-_]?\d*|full|q?lora|sft|dpo|kto|ppo|pt|final|merged|best|last|latest|hf",
    re.I,
)
"""Folders of one trained copy of a model, below the one that is called after it."""


def _named_part(path: str) -> str:
    """Return the last part of a path that may name a model.

    Example:
        >>> _named_part("/saves/Llama-3-70B-Instruct/full/sft"), _named_part("out/Qwen3-8B/checkpoint-500/")
        ('Llama-3-70B-Instruct', 'Qwen3-8B')
    """
    parts = [part for part in path.split("/") if part]
    return next((part for part in reversed(parts) if not _COPY.fullmatch(part)), "")


def _cached_repository(text: str) -> str:
    """Return the repository that a path into another machine's cache of Hugging Face's names, or nothing.

    Example:
        >>> _cached_repository("/home/me/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a72")
        'Qwen/Qwen3-4B'
    """
    folders = (part.split("--") for part in text.split("/"))
    return next(("/".join(words[1:]) for words in folders if len(words) == 3 and words[0] == "models"), "")


def _guessed(text: str, name: str, catalog: Catalog, by: str = "its name") -> ResolvedName:
    """Return a guess, with the sentence that says so, and ``by`` what it is made."""
    title = catalog.models.entries[name].title
    note = f"{printable(text)!r} is guessed from {by} to have the shapes of {title}: give its config.json to be sure"
    return ResolvedName(name, "guess", (note,), weights_by_name(text))


def is_known(text: str, catalog: Catalog) -> bool:
    """Tell whether a name means something for sure, on this machine or in the catalog."""
    if path_kind(usable_path(text)) != "nothing":
        return True
    if _local(text) is not None or cached_config(text) is not None:
        return True
    known = _listed(text, catalog)
    return known is not None and known.how != "guess"


def _resolved(text: str, catalog: Catalog, bases: int) -> ResolvedName:
    folder = _local(text)
    if folder is not None:
        return _or_base(ResolvedName(folder, "folder"), text, catalog, bases)
    cached = cached_config(text)
    if cached is not None:
        return _or_base(ResolvedName(cached, "cache"), text, catalog, bases)
    known = _listed(text, catalog)
    if known is not None and known.how == "guess":
        return _guessed(text, str(known.target), catalog, "what it was trained from")
    if known is not None:
        return replace(known, weights=weights_by_name(text))
    from memplan.library.lookup.name_guesses import guessed_name, refuse_unmodelled

    refuse_unmodelled(text, catalog)
    guess = guessed_name(text, catalog)
    if guess is None:
        raise unknown_model(text, catalog)
    return _guessed(text, guess, catalog)


def _listed(text: str, catalog: Catalog) -> ResolvedName | None:
    """Return what a name, an alias, an id or a mirror means, with or without its organisation; None where none is like it."""
    if text in catalog.models:
        return ResolvedName(catalog.models.name_of(text), "catalog")
    spelled: dict[str, tuple[str, How]] = {}
    owners: set[tuple[str, How]] = set()
    keys: tuple[tuple[str, How], ...] = (
        ("hf_id", "catalog"),
        ("ids", "catalog"),
        ("mirrors", "mirror"),
        ("tuned", "guess"),
    )
    meant = normalised_name(text)
    for key, how in keys:
        for spelling, name in catalog.models.listed(key):
            spelled.setdefault(spelling.lower(), (name, how))
            for part in (spelling, spelling.rsplit("/", 1)[-1]):
                if normalised_name(part) == meant and same_numbers(text, part):
                    owners.add((name, how))
    known = spelled.get(text.lower()) or (min(owners, key=lambda owner: owner[1]) if _one_entry(owners) else None)
    return None if known is None else ResolvedName(*known)


def _one_entry(owners: set[tuple[str, How]]) -> bool:
    return len({name for name, _ in owners}) == 1


def unknown_model(text: str, catalog: Catalog) -> UnknownNameError:
    """Return the error for a name that means nothing, with the nearest one."""
    known = [*catalog.models.entries, *(a for entry in catalog.models.entries.values() for a in entry.aliases)]
    from memplan.library.lookup.name_guesses import sizes

    alike = [name for name in known if sizes(name) == sizes(text)] if sizes(text) else known
    hints = (match_hint(name, names) for names in (alike, known) for name in (text, text.rsplit("/", 1)[-1]))
    hint = next(filter(None, hints), "")
    if not hint and text and is_folder(Path(text)):
        return UnknownNameError(
            f"{printable(text)}: a folder without config.json, which tells a model's shapes (see: memplan list models)"
        )
    online = ", or --online to fetch it" if text.count("/") == 1 else ""
    return UnknownNameError(
        f"unknown model {printable(text)!r}{hint}{' Or' if hint else ':'} give its config.json{online} (see: memplan list models)"
    )


# ------------------------------------------------------------------ files
def _local(text: str) -> Path | None:
    """Return the file or folder that a text means, or None where it is a name."""
    path = usable_path(text)
    if path.suffix in (".yaml", ".yml"):
        expected = "expected a config.json, a GGUF or safetensors file; a training config is --config"
        raise InvalidFileError([f"{shown_path(path)}: a YAML file describes no model; {expected}"])
    written_as_path = text == "-" or text.startswith((".", "/", "~")) or is_model_file(path.name)
    if written_as_path or len(path.parts) > 2:
        if text != "-" and path_kind(path) == "nothing" and not is_model_file(path.name):
            raise InvalidFileError([f"{shown_path(path)}: no such file or directory"])
        return path
    return path if is_file(path / CONFIG) or is_file(path / ADAPTER) else None


def hub_cache() -> Path:
    """Return the folder in which Hugging Face's libraries keep what they downloaded.

    Source:
        https://github.com/huggingface/huggingface_hub/blob/v1.1.0/src/huggingface_hub/constants.py
    """
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return usable_path(os.environ[name])
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface")
    return usable_path(home) / "hub"


def cached_config(repository: str) -> Path | None:
    """Return the ``config.json``, or ``adapter_config.json``, of a repository in the cache, or None.

    Of several snapshots the one that ``refs/main`` names goes first, then the last by name.
    """
    if not REPOSITORY.fullmatch(repository):
        return None
    folder = hub_cache() / f"models--{repository.replace('/', '--')}"
    snapshots = folder / "snapshots"
    if not is_folder(snapshots):
        return None
    names = sorted((path.name for path in snapshots.iterdir()), reverse=True)
    main = folder / "refs" / "main"
    first = read_text(main).strip() if is_file(main) else ""
    ordered = [name for name in names if name == first] + [name for name in names if name != first]
    files = (snapshots / name / file for name in ordered for file in (CONFIG, ADAPTER))
    return next((file for file in files if is_file(file)), None)


def _or_base(resolved: ResolvedName, text: str, catalog: Catalog, bases: int) -> ResolvedName:
    """Return an adapter's base model instead of an adapter, which has no shapes of its own."""
    path = Path(resolved.target)
    file = path / ADAPTER if is_folder(path) and not is_file(path / CONFIG) else path
    if file.name != ADAPTER or not is_file(file):
        return resolved
    config = parse_object(read_text(file), shown_path(file))
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base or not bases:
        raise CannotAnswerError(
            f"{shown_path(file)}: a PEFT adapter, which has no shapes of its own, and names no base"
        )
    below = _resolved(base, catalog, bases - 1)
    note = f"{printable(text)!r} is a PEFT adapter: its base model {printable(base)!r} is planned{_as_settings(config)}"
    return replace(below, notes=(note, *below.notes))


def _as_settings(config: Mapping[str, Any]) -> str:
    rank = config.get("r")
    plain = isinstance(rank, int) and not isinstance(rank, bool)
    return f", with --set adapter.kind=lora --set adapter.rank={rank} for what was trained on it" if plain else ""
