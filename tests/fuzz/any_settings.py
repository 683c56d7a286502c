"""Settings drawn at random: every key of a training config, with its own words, small numbers, names of the catalog, or hostile words."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from random import Random
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from memplan.catalog.training_config import TrainingConfig
from memplan.library.lookup import Overrides, catalog_model, find_setup
from memplan.model.inventory import ROLES
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from tests.jobs import shipped_catalog

from .arguments import NUMBERS, SET_VALUES

SHIPPED = shipped_catalog()
CARDS = tuple(sorted(SHIPPED.gpus))
CONFIGS = tuple(sorted(SHIPPED.configs))
STACKS = tuple(sorted(SHIPPED.stacks))
MODELS = (
    "smollm2-135m", "gpt2", "qwen2.5-0.5b", "gemma-3-1b", "pythia-160m", "falcon-7b", "qwen1.5-moe-a2.7b",
    "deepseek-v2-lite", "gpt-oss-20b", "qwen2.5-vl-3b", "llama-3.1-8b",
)  # fmt: skip
PLAUSIBLE = (
    "0", "1", "2", "3", "4", "8", "16", "100", "1000", "65536", "0.5", "true", "false", "null", "auto", "1 GiB",
)  # fmt: skip
OF_TYPE: Mapping[Any, tuple[str, ...]] = {
    int: ("1", "2", "3", "4", "8", "96", "1000", "65536"),
    float: ("0", "0.1", "0.3", "1"),
    bool: ("true", "false"),
    str: ("1 GiB", "0 MiB", "[[embedding], [decoder, loss]]"),
}
BESIDE = (
    (), (), ("adapter.kind=lora",), ("parallel.engine=deepspeed",), ("activation_checkpointing=full",), ("freeze.last_layers=1",),
    ("method.stage=dpo",), ("method.stage=grpo",), ("images.per_row=1", "images.height=448", "images.width=448"),
)  # fmt: skip
"""Settings without which other keys count for nothing."""
LISTS = (
    "[q_proj]", "[c_attn, c_proj]", "[lm_head]", "['.*']", "['(.*)*x']", "[language_model]", "[core_attn, mlp]",
    "all-linear",
)  # fmt: skip


def _options(hint: Any) -> Iterator[str]:
    """Yield the words that a key of this type takes."""
    if get_origin(hint) is Literal:
        yield from (str(word) for word in get_args(hint))
    elif hint in OF_TYPE:
        yield from OF_TYPE[hint]
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _options(part)
    elif get_origin(hint) is tuple:
        yield from LISTS


def _keys(kind: type, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every key of a config, parts included, and the words that it takes."""
    for name, hint in get_type_hints(kind).items():
        parts = [part for part in (hint, *get_args(hint)) if isinstance(part, type) and is_dataclass(part)]
        for part in parts:
            yield from _keys(part, f"{prefix}{name}.")
        if get_origin(hint) is Mapping:
            yield from ((f"{prefix}{name}.{role}", ()) for role in ("default", *ROLES))
        elif not parts:
            yield f"{prefix}{name}", tuple(_options(hint))


KEYS = tuple(_keys(TrainingConfig))
NAMES: Mapping[str, tuple[str, ...]] = {
    "weights": tuple(sorted(SHIPPED.formats)),
    "optimizer": tuple(sorted(SHIPPED.optimizers)),
    "gradients": tuple(sorted(SHIPPED.gradients)),
    "stack": tuple(sorted(SHIPPED.stacks)),
}


def setting(random: Random) -> str:
    """Return ``KEY=VALUE``, most often one that some config could have."""
    key, words = random.choice(KEYS)
    kind = random.randrange(24)
    if kind < 20:
        known = NAMES.get(key.partition(".")[0], words) if key != "gradients.lifetime" else words
        return f"{key}={random.choice(known)}"
    return f"{key}={random.choice((PLAUSIBLE, PLAUSIBLE, NUMBERS, SET_VALUES)[kind - 20])}"


def plan_with_settings(random: Random) -> tuple[str, object]:
    """Return settings drawn at random as one text, and what plans a job with them."""
    model, config, card = random.choice(MODELS), random.choice(CONFIGS), random.choice(CARDS)
    given = (*random.choice(BESIDE), *(setting(random) for _ in range(random.randint(1, 3))))
    gpus = random.choice((1, 1, 1, 1, 2, 8))
    overrides = Overrides(
        settings=given, gpus=gpus, counted=gpus > 1, stack=random.choice((None, None, random.choice(STACKS)))
    )

    def planned() -> object:
        entry = catalog_model(model, SHIPPED)
        setup = find_setup(config, overrides, SHIPPED, entry)
        return CompiledPlan(entry, setup).evaluate(Device(SHIPPED.gpus[card], card, gpus))

    return f"{model} {config} {card} {overrides}", planned
