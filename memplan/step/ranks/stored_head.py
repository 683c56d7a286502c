"""Which ends of a model accelerate finds, and a head that is a unit of its own, which a loss gathers as it is stored, and does not call."""

from dataclasses import replace

from memplan.model.inventory import Role
from memplan.model.spec import ModelSpec
from memplan.step.states.parallel_shards import gathered_setup, is_accelerated
from memplan.training.resolved import TrainingSetup


def finds_norm(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether accelerate finds a model's final norm: a child of its base model, where PEFT has not wrapped what goes by that name.

    Source:
        ``_find_final_norm`` in accelerate/utils/fsdp_utils.py (1.15.0), which asks PEFT's model for ``base_model_prefix``:
        for ``model`` that is the whole model inside, for ``transformer`` it is the base model.
    """
    base, *path = spec.names.final_norm.split(".")
    return len(path) == 1 and not (setup.config.adapter is not None and base == "model")


def names_in_units(spec: ModelSpec, setup: TrainingSetup) -> tuple[str, ...]:
    """Return what names of weights begin with that accelerate puts in units of their own; what else the ends have is the root's.

    Source:
        ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py (1.15.0).
    """
    names = spec.names
    own = (names.embedding, names.head, *((names.final_norm,) if finds_norm(spec, setup) else ()))
    return tuple(f"{name}." for name in own)


def gathers_head_by_hand(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether a loss gathers the head itself, as it is stored: one that is a unit alone, whose module it does not call.

    Source:
        ``_fused_forward`` in trl/trainer/utils.py (1.16.0), which asks a sharded weight for its ``full_tensor``.
    """
    alone = not spec.tie_word_embeddings and not finds_norm(spec, setup)
    engine = setup.config.parallel.engine
    return alone and setup.profile.loss == "fused-head" and is_accelerated(setup) and engine == "torch"


def with_stored_head(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup of gathered weights, of which the head is in the dtype that it is stored in."""
    whole = gathered_setup(setup)
    role: Role = "head"
    return replace(
        whole,
        format_names={**whole.format_names, role: setup.format_names[role]},
        formats={**whole.formats, role: setup.formats[role]},
    )
