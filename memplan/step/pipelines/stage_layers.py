"""Which layers each stage of a pipeline has, as torchtitan divides them, and the model as one rank has it."""

from dataclasses import replace

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.inventory import inventory_of
from memplan.model.model import Model
from memplan.step.pipelines.pipeline_schedules import stages_of
from memplan.training.resolved import TrainingSetup


def layers_of_stages(layers: int, parallel: Parallel) -> tuple[int, ...]:
    """Return how many layers each stage has, the first stage first: the embedding counts as some, and so does the head.

    Raises:
        InvalidFileError: More stages than layers.

    Source:
        ``_generate_llm_fqn_per_model_part`` in torchtitan/distributed/pipeline_parallel.py (0.3.0).

    Example:
        >>> layers_of_stages(32, Parallel(pipeline=4))
        (8, 9, 8, 7)
    """
    stages, less, least = (
        parallel.pipeline * parallel.virtual,
        parallel.first_stage_less_layers,
        parallel.last_stage_less_layers,
    )
    each, more = divmod(layers + less + least, stages)
    if each < max(1, less, least):
        most = (layers + less + least) // max(1, less, least)
        raise InvalidFileError(
            [
                f"parallel.pipeline: {layers} layers do not fill {stages} stages, but {most} at most (parallel.pipeline times parallel.virtual)"
            ]
        )
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= less
    sizes[-1] -= least
    return tuple(sizes)


def at_stage(setup: TrainingSetup, stage: int) -> TrainingSetup:
    """Return a setup of which one rank of the pipeline is planned."""
    parallel = replace(setup.config.parallel, stage=stage)
    return replace(setup, config=replace(setup.config, parallel=parallel))


def staged(model: Model, setup: TrainingSetup) -> Model:
    """Return a model as one rank of a pipeline has it.

    Args:
        model: The whole model, as its stack builds it and a rank's tensor degree divides it.
        setup: The training setup, whose ``parallel.stage`` is the rank.

    Raises:
        CannotAnswerError: A model that is not of equal layers, or whose ends are tied.
        InvalidFileError: More stages than layers.
    """
    parallel = setup.config.parallel
    if model.spec.tie_word_embeddings or len(model.spec.runs) > 1:
        what = "tied embeddings" if model.spec.tie_word_embeddings else "layers of several kinds"
        raise CannotAnswerError(f"parallel.pipeline: {what} of {model.spec.name} over stages are not modelled; use 1")
    sizes, own = layers_of_stages(model.spec.num_hidden_layers, parallel), stages_of(parallel.stage or 0, parallel)
    if any(sizes[stage] == 0 for stage in own):
        raise CannotAnswerError(
            f"parallel.pipeline: a stage without layers is not modelled; {len(sizes)} stages of {sizes}"
        )
    run = replace(model.spec.runs[0], count=sum(sizes[stage] for stage in own))
    spec = replace(model.spec, runs=(run,))
    ends = {"embedding": 0 in own, "head": len(sizes) - 1 in own, "norm": len(sizes) - 1 in own}
    retained = tuple(tensor for tensor in inventory_of(spec) if "{}" in tensor.name or ends.get(tensor.role, True))
    return replace(model, spec=spec, inventory=retained)
