"""A reference model's forward under ZeRO 3: an engine of its own gathers its parameters, beside what the trained model's has gathered.

Source:
    ``prepare_deepspeed`` in trl/models/utils.py (1.16.0), which hands DeepSpeed the job's file before accelerate fills in what is
    ``auto`` there; ``DeepSpeedConfigModel`` in deepspeed/runtime/config_utils.py (0.19.8) leaves such keys out.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from memplan.step.engines.cut_sections import Segment, cut
from memplan.step.engines.engine_step import Following
from memplan.step.engines.gathered_parameters import GatheredParameters, Limits
from memplan.step.engines.module_visits import Listed, Modules, followed
from memplan.step.engines.reduced_gradients import EngineBytes
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import (
    EMBEDDING,
    HEAD,
    beside_reference,
    forward_arguments,
    places_alone,
    reference_model,
)
from memplan.step.playing.recomputation import Mark
from memplan.step.playing.section import Section, forward_player
from memplan.step.states.partitioned_weights import PREFETCHED, reference_threshold
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Form
from memplan.step.tapes.moments import Instant


class ReferenceParameters:
    """What a reference model's engine gathers through one forward, with what is there besides."""

    def __init__(self, modules: Modules, gathered: GatheredParameters, beside: EngineBytes) -> None:
        self._modules, self._gathered, self._beside = modules, gathered, beside

    @property
    def resident(self) -> EngineBytes:
        """What is there between two marks."""
        return self._with(self._gathered.bytes)

    def arrive(self, name: str, kind: str = "gradient") -> EngineBytes:
        """Gather and let go of what a mark tells."""
        before = self._gathered.bytes
        return self._with(max(before, followed(self._modules, self._gathered, name, kind)))

    def end(self) -> EngineBytes:
        """Return what stays."""
        return self.resident

    def _with(self, gathered: int) -> EngineBytes:
        return replace(self._beside, communication=self._beside.communication + gathered)


def referred(
    inputs: StepInputs,
    taped: ModelOnTape,
    model: tuple[Callable[[], Modules], Mapping[str, int]],
    around: Form,
    beside: EngineBytes,
) -> Iterator[Instant]:
    """Yield the moments of a reference model's forward, or of the model's without adapters, of layers alike those beside which the most is gathered.

    Args:
        taped: The model that is trained, which the reference is another of.
        model: What its modules are, of which none has run, and the elements of its parameters.
        around: What its forward has left.
        beside: What its engine has gathered, and gradients.
    """
    modules, elements = model
    known = inputs.setup.config.method.reference_model == "resident"  # else it is the trained one's engine, begun anew
    taped = taped if known else reference_model(inputs, taped) or taped
    arguments = forward_arguments(inputs)
    places = [*places_alone(inputs, taped, around + beside_reference(inputs), arguments)]
    parts = {kind: forward_segments(section) for kind, _, section in places}
    layers = (
        (kind, range(run.first, run.first + run.count)) for kind, run in zip(taped.kinds, taped.runs, strict=True)
    )
    order = [(EMBEDDING, -1), *((kind, number) for kind, numbers in layers for number in numbers), (HEAD, -1)]
    listed = Listed(modules())
    for kind, number in order:
        Following(listed).walk(parts[kind], number)
    setup = inputs.setup
    zero, least = setup.config.parallel.deepspeed, reference_threshold(setup)
    ahead = PREFETCHED if zero.prefetch_bucket_size == "auto" else zero.prefetch_bucket_size
    limits = Limits(
        setup.config.parallel.data,
        setup.compute_bytes,
        ahead * known,
        zero.max_live_parameters,
        zero.max_reuse_distance * known,
        setup.offloads_weights,
    )
    whole = {name for name, size in elements.items() if size <= least and known}
    gathered = GatheredParameters(listed.visits, elements, whole, elements, limits)
    following = Following(ReferenceParameters(modules(), gathered, beside))
    walked = [(kind, following.walk(parts[kind], number)) for kind, number in order]
    for kind, below, _ in places:
        following.forget()
        for resident in (resident for other, resident in walked if other == kind):
            for moment in following.moments(parts[kind], resident, below, "forward"):
                yield replace(moment, operation=f"reference: {moment.operation}")


def forward_segments(section: Section) -> tuple[Segment, ...]:
    """Return a forward that saves nothing, cut where modules begin and end."""
    player = forward_player(section.tape)
    marks: list[Mark] = []
    player.marked, player.visits = marks.append, True
    player.forward(saves=False)
    return cut(player, marks)
