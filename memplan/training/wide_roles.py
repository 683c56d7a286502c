"""Roles that a family's own code leaves in fp32 where all else of it is loaded in 16 bits."""

from collections.abc import Iterator
from dataclasses import replace

from memplan.model.families import around
from memplan.model.inventory import Role
from memplan.model.model import Model
from memplan.training.resolved import TrainingSetup


def with_wide_roles(setup: TrainingSetup, model: Model) -> TrainingSetup:
    """Return a setup in which such roles, and what an optimizer keeps of them, are in fp32 where the stack leaves them so.

    Source:
        ``_get_dtype_plan`` in transformers/modeling_utils.py (5.24.0): ``_keep_in_fp32_modules_strict`` in
        transformers/models/deepseek_v3/modeling_deepseek_v3.py, and in those of DeepSeek V2, GLM-4.5, GLM-4.7 Flash and
        Nemotron-H, names routers; ``_keep_in_fp32_modules`` in that of gpt-oss, which holds for fp16 alone, norms.
        DeepSpeed casts whole models, these too.
    """
    if setup.config.parallel.engine == "deepspeed":
        return setup
    roles = [role for role in _wide_roles(setup, model) if role in setup.wide_optimizers]
    if not roles:
        return setup
    own = {role: setup.wide_optimizers[role] for role in roles}
    names = {role: name for role, (name, _) in own.items()}
    setup = replace(setup, optimizer_names={**setup.optimizer_names, **names})
    entries = {role: entry for role, (_, entry) in own.items()}
    return replace(setup.with_floats(dict.fromkeys(roles, "fp32")), optimizers={**setup.optimizers, **entries})


def _wide_roles(setup: TrainingSetup, model: Model) -> Iterator[Role]:
    mixtures = (run.layer.mixture for run in model.spec.runs)
    wide = any(part is not None and part.fp32_router for part in mixtures)
    if wide and setup.format_names["router"] in ("bf16", "fp16"):
        yield "router"
    if setup.format_names["norm"] == "fp16" and around(model.spec.architecture).wide_norms:
        yield "norm"
