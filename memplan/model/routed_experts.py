"""How many experts a model has, and how many of them a token passes through."""

from memplan.model.spec import LayerRun, MixtureOfExperts, ModelSpec


def expert_modules_of(run: LayerRun) -> int:
    """Return how many experts a layer of a run has that are modules of their own."""
    part = run.layer.feed_forward
    return part.num_experts if isinstance(part, MixtureOfExperts) and part.modules else 0


def routed_to(spec: ModelSpec) -> tuple[int, int]:
    """Return how many experts a token passes through, and of how many, in the first layer that has some; (0, 1) for none."""
    parts = (run.layer.feed_forward for run in spec.runs)
    return next(((p.experts_per_token, p.num_experts) for p in parts if isinstance(p, MixtureOfExperts)), (0, 1))


def experts_of(spec: ModelSpec) -> int:
    """Return the routed experts of a layer that has some, those of the layer that has fewest; 0 for none."""
    parts = (run.layer.mixture for run in spec.runs)
    return min((part.num_experts for part in parts if part is not None), default=0)
