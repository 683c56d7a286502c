"""Keys of an imported job that no training config has: left out where they change nothing, and refused elsewhere."""

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import Embedding, Method, Rollout
from memplan.errors import CannotAnswerError, printable
from memplan.training.rules.distillation_rules import DISTILLED
from memplan.training.rules.method_rules import GENERATING
from memplan.training.rules.ppo_rules import BESIDE_VALUES, HAS_TRAINER


def without_keys(data: Mapping[str, Any], paths: Collection[str], above: str = "") -> dict[str, Any]:
    """Return nested keys without those at some dotted paths."""
    retained = {key: value for key, value in data.items() if f"{above}{key}" not in paths}
    return {
        key: without_keys(value, paths, f"{above}{key}.") if isinstance(value, Mapping) else value
        for key, value in retained.items()
    }


def refuse_unplanned(text: str, data: Mapping[str, Any], kind: type, above: str = "") -> None:
    """Refuse keys and values of DESIGN's vocabulary that nothing models yet.

    Raises:
        CannotAnswerError: One is set.
    """
    hints = get_type_hints(kind)
    for key, value in data.items():
        path = f"{above}{key}"
        if key not in hints:
            if value not in (None, False, 0, 1, "none", "false"):
                raise CannotAnswerError(f"{text}: {path}: {printable(str(value))} is not modelled yet")
            continue
        inner = next((one for one in (hints[key], *get_args(hints[key])) if is_dataclass(one)), None)
        if inner is not None and isinstance(value, Mapping):
            refuse_unplanned(text, value, inner, f"{path}.")  # type: ignore[arg-type]
        allowed = [
            word for one in (hints[key], *get_args(hints[key])) if get_origin(one) is Literal for word in get_args(one)
        ]
        others = tuple(one for one in get_args(hints[key]) if isinstance(one, type))
        if allowed and value not in allowed and value is not None and not isinstance(value, others):
            raise CannotAnswerError(
                f"{text}: {path}: {printable(str(value))} is not modelled yet; --set {path}=VALUE plans another"
            )


def refuse_other_policies(text: str, stage: str, stack: str | None, catalog: Catalog) -> None:
    """Refuse PPO as a trainer runs it whose loop is another than the one that is planned.

    Raises:
        CannotAnswerError: The stack that a file stands for has no such loop.
    """
    if stage in BESIDE_VALUES and (stack is None or stage not in catalog.stack(stack).stages):
        how = f"memplan fit MODEL --stack {HAS_TRAINER} --set method.stage={stage} --set method.reward_model.model=NAME"
        raise CannotAnswerError(
            f"{text}: {stage} by a loop of this trainer's own is not modelled; as TRL's PPOTrainer runs it: {how}"
        )


def planned_keys(data: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return the keys that a training config, or a part of it, has, without those that are nothing."""
    hints = get_type_hints(kind)
    names = {one.name for one in fields(kind)}
    known = {}
    for key, value in data.items():
        if key not in names or value is None:
            continue
        inner = next((one for one in (hints[key], *get_args(hints[key])) if is_dataclass(one)), None)
        known[key] = planned_keys(value, inner) if inner is not None and isinstance(value, Mapping) else value  # type: ignore[arg-type]
    return known


def method_keys(method: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Return what an imported job says of its method as a training config has it, at a config's stage."""
    keys = {} if (balances := method.get("balances")) is None else {"balances": balances}
    if stage == "sft":
        return keys
    if stage in BESIDE_VALUES:
        return {**planned_keys(method, Method), "stage": stage}
    generated = stage in GENERATING or (stage in DISTILLED and "rollout" in method)
    rollout = {"rollout": planned_keys(method.get("rollout", {}), Rollout)} if generated else {}
    rollout |= _taught(method) if stage in DISTILLED else {}
    texts = {"embedding": planned_keys(method.get("embedding", {}), Embedding)} if stage == "embedding" else {}
    said = {key: method.get(key) for key in ("reference_model", "chosen_nll", "labels")}
    return {**said, "stage": stage, **rollout, **texts, **keys}


def _taught(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an imported job says of a teacher, whose name alone stands there, as a training config has it."""
    teacher = {
        "model": method.get("teacher"),
        "dtype": method.get("teacher_dtype"),
        "weights": method.get("teacher_weights"),
    }
    said = {key: value for key, value in teacher.items() if value is not None}
    return {"teacher": said or None, "divergence": method.get("divergence"), "trainer": method.get("trainer")}
