"""A training step under DeepSpeed's ZeRO 3: gathered parameters and reduced gradients lie around the tapes of whole weights.

Source:
    deepspeed/runtime/zero/stage3.py (0.19.8), ``__add_grad_to_ipg_bucket``, ``__reduce_and_partition_ipg_grads``,
    ``step`` and ``_post_step``; deepspeed/runtime/comm/coalesced_collectives.py, ``reduce_scatter_coalesced``.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from memplan.errors import CannotAnswerError
from memplan.step.alive_around_layers import (
    embedded_leaf,
    forgotten_keys,
    graph_of_loss,
    leaf_apart,
    named_embeddings,
    retained_graph,
    returned_before,
    stored_keys,
)
from memplan.step.ends.head_on_tape import FUSED_LOSSES
from memplan.step.engines.cut_sections import Segments
from memplan.step.engines.engine_step import (
    FORMULA,
    NORM_BYTES,
    EnginePass,
    Following,
    besides,
    engine_pass,
    tied_gradients,
)
from memplan.step.engines.gathered_parameters import GatheredParameters, Limits, Visit
from memplan.step.engines.module_visits import Listed, Modules, followed
from memplan.step.engines.reduced_gradients import EngineBytes
from memplan.step.engines.reference_forward import referred
from memplan.step.head_instants import TIED_SUM, after_backward
from memplan.step.instants import StepForms, saved_by_layers
from memplan.step.kernels.family_code import family_code, module_dropouts
from memplan.step.kernels.layer_arguments import layer_arguments
from memplan.step.losses.token_chunk_loss import TOKEN_CHUNKS
from memplan.step.model_on_tape import ModelOnTape, PlayedModel
from memplan.step.no_grad_instants import EVALUATION, forward_only_instants
from memplan.step.playing.recomputation import Mark
from memplan.step.states.optimizer_scratch import Temporaries
from memplan.step.states.parallel_shards import ADAPTER, in_layers
from memplan.step.states.partitioned_weights import Partitions, partitions
from memplan.step.step_inputs import StepInputs, buffers, retained_arguments, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form
from memplan.step.tapes.moments import Instant, dominant
from memplan.step.units.host_memory import FP32_BYTES
from memplan.training.adapters import REFERENCE
from memplan.units import ceil_div, format_bytes

NORM_ELEMENTS = 250_000_000
"""Elements of a gradient that are in fp64 at once for its norm."""


class Leaving(NamedTuple):
    """How a rank's pieces of gradients leave for host memory.

    Source:
        ``partition_grads``, ``_offload_grad_partition_at_boundary`` and ``_constant_buffered_norm2`` in
        deepspeed/runtime/zero/stage3.py (0.19.8).
    """

    last: bool  # Whether the optimizer steps behind this micro-step
    summed: bool  # Whether those of micro-steps before come back to be added to

    def most(self, pieces: Sequence[int], width: int) -> int:
        """Return the most that is there besides as one piece after the other leaves.

        A copy of it, beside the one before it where that was a sum, and either a part of it in fp64 for its norm or all of it in fp32.
        """
        most = before = 0
        for elements in pieces:
            wide = max(NORM_BYTES * min(elements, NORM_ELEMENTS), FP32_BYTES * elements * (width < FP32_BYTES))
            copies = width * (elements + before)
            most = max(most, copies, width * elements + wide * self.last)
            before = elements * self.summed
        return most


class GatheredGradients:
    """Parameters that are gathered, and gradients that leave through a bucket into a rank's pieces of them, which stay.

    Args:
        gathered: What is gathered as they run.
        sizes: Elements of each parameter.
        leaving: Where they leave for host memory.
    """

    def __init__(
        self,
        modules: Modules,
        gathered: GatheredParameters,
        sizes: Mapping[str, int],
        rules: Partitions,
        leaving: Leaving | None = None,
    ) -> None:
        self._modules, self._gathered, self._sizes, self._rules = modules, gathered, sizes, rules
        self._leaving = leaving
        self._names: list[str] = []
        self._elements = self._waiting = 0

    @property
    def resident(self) -> EngineBytes:
        """What is there between two marks."""
        return EngineBytes(self._gathered.bytes, self._rules.gradient_bytes + self._waiting)

    def arrive(self, name: str, kind: str = "gradient") -> EngineBytes:
        """Take in what is marked."""
        if kind == "gradient":
            return self._take(name)
        before = self.resident
        most = followed(self._modules, self._gathered, name, kind)
        return max(before, EngineBytes(most, before.gradients), key=lambda resident: resident.bytes)

    def end(self) -> EngineBytes:
        """Reduce what is left, and let go of what is gathered still."""
        most = self._reduce()
        self._gathered.end()
        return most

    def _take(self, name: str) -> EngineBytes:
        """Take the gradient of a parameter into the bucket, which is reduced first where it has no room."""
        elements, rules = self._sizes[name], self._rules
        most = self.resident
        if self._elements + elements > rules.bucket and self._names:
            most = self._reduce()
        self._names.append(name)
        self._waiting += elements * rules.width if self._elements + elements > rules.bucket else 0
        self._elements += elements
        return most

    def _reduce(self) -> EngineBytes:
        """Return the most that is there: all gradients of the bucket interleaved in a tensor, with the padding of each."""
        sizes, ranks, before = [self._sizes[name] for name in self._names], self._rules.ranks, self.resident
        padded = [ranks * ceil_div(size, ranks) for size in sizes]
        copies = self._rules.copies or self._elements > self._rules.bucket
        in_place = not copies or sizes == padded[:1] or not sizes
        copied = 0 if in_place else self._rules.width * (2 * sum(padded) - sum(sizes))
        if self._leaving is not None:
            copied += self._leaving.most([size // ranks for size in padded], self._rules.width)
        self._names, self._elements, self._waiting = [], 0, 0
        return EngineBytes(before.communication + copied, before.gradients)


class GatheredStep:
    """One step of DeepSpeed's engine under ZeRO 3.

    Args:
        rules: What a rank gathers and reduces by.

    Attributes:
        elements: Of each parameter, in the order in which the model has them.
        frozen: Those that are not trained.
        whole: Those that stay gathered.
        begun_anew: Whether a forward without adapters begins the order of modules anew, so that it is never known: nothing is
            gathered ahead, and what has run is let go of, even what stays else.

    Source:
        ``reset_step``, ``trace_prologue`` and ``release_sub_module`` in deepspeed/runtime/zero/partitioned_param_coordinator.py (0.19.8).
    """

    def __init__(self, inputs: StepInputs, taped: ModelOnTape, rules: Partitions) -> None:
        self.inputs, self.taped, self.rules = inputs, taped, rules
        self._pass = replace(engine_pass(inputs, taped, visits=True), forward=self._forward, tied=_tied)
        tensors = list(in_layers(inputs.states.tensors))
        self.elements = {name: e.tensor.elements for name, e in tensors if not name.startswith(REFERENCE)}
        self.frozen = frozenset(name for name, entry in tensors if not entry.trainable)
        if embedded_leaf(inputs, taped) is not ZERO:  # whose output needs a gradient, which asks for the weight
            mark = Mark(0, "backward", inputs.spec.names.embedding)
            gathered = (((), Instant("", "gather", ZERO), mark),)
            self._pass = replace(self._pass, embedding=Segments(self._pass.embedding.forward, gathered))
        self.whole = frozenset(name for name, size in self.elements.items() if size <= rules.threshold)
        self.begun_anew = inputs.setup.config.method.reference_model == "adapter-off"

    def modules(self, *, adapted: bool = True) -> Modules:
        """Return the model's modules, of which none has run, with adapters or with these switched off."""
        setup, spec = self.inputs.setup, self.inputs.spec
        tables = int(family_code(setup.stack, spec.architecture).forms_tables and not spec.learned_positions)
        wrapped = setup.config.adapter is not None
        outside = setup.profile.loss in (*TOKEN_CHUNKS, *FUSED_LOSSES)
        head = f"{spec.names.embedding if spec.tie_word_embeddings else spec.names.head}.weight" if outside else ""
        tied = spec.tie_word_embeddings
        dropouts = module_dropouts(setup.stack, spec.architecture)
        names = tuple(name for name in self.elements if adapted or ADAPTER not in name)
        return Modules(names, spec.names, head, *dropouts, tied=tied, wrapped=wrapped, tables=tables)

    def listed(self) -> Sequence[Visit]:
        """Return all modules that run in a forward and backward, in order."""
        listed = Listed(self.modules())
        self._pass.walk(listed)
        return listed.visits

    def _forward(self, walk: EnginePass, following: Following, played: PlayedModel) -> Iterator[Instant]:
        """Yield the moments of forward, the reference model's beside what is gathered then."""
        behind = yield from through_forward(walk, following, played)
        if self.inputs.setup.config.method.reference_model in ("resident", "adapter-off"):
            elements = {
                name: size for name, size in self.elements.items() if not self.begun_anew or ADAPTER not in name
            }
            modules = partial(self.modules, adapted=not self.begun_anew)
            yield from referred(self.inputs, self.taped, (modules, elements), behind, following.resident)
            return
        for moment in forward_only_instants(self.inputs, self.taped, behind):
            yield following.with_resident(moment)

    def instants(self) -> Iterator[Instant]:
        """Yield the candidates for the peak."""
        inputs, rules = self.inputs, self.rules
        visits = self.listed()
        ahead, distance = (0, 0) if self.begun_anew else (rules.ahead, rules.distance)
        limits = Limits(rules.ranks, rules.width, ahead, rules.live, distance, rules.moved)
        several = inputs.setup.config.gradient_accumulation_steps > 1

        def one_pass(*, second: bool) -> Iterator[Instant]:
            whole = frozenset[str]() if self.begun_anew else self.whole
            anew = (frozenset() if second else self.whole) if self.begun_anew else None
            gathered = GatheredParameters(visits, self.elements, whole, self.frozen, limits, anew=anew)
            leaving = Leaving(last=second or not several, summed=second) if rules.offloads else None
            return self._pass.instants(GatheredGradients(self.modules(), gathered, self.elements, rules, leaving))

        most = 0
        for instant in one_pass(second=False):
            most = max(most, instant.communication if instant.name == "forward" else 0)
            yield instant
            if several and not (rules.offloads or self.begun_anew):
                yield _of_second(instant)
        if several and (rules.offloads or self.begun_anew):
            yield from map(_of_second, one_pass(second=True))
        graph = graph_of_loss(inputs, self.taped)  # the engine steps before the loop has let go of the loss
        for instant in after_backward(inputs, self.taped, rules.gradient_bytes):
            if instant.name == "gradient clipping":
                continue  # its norm is a part of the step
            if instant.name == EVALUATION:  # which gathers no more than a forward that trains
                instant = besides(instant, EngineBytes(most, 0))
            yield instant.around(graph) if instant.name == "optimizer step" else instant


def _of_second(instant: Instant) -> Instant:
    """Return an instant as one of a later micro-step."""
    return replace(instant, name="second backward", operation=f"{instant.operation} ({instant.name})")


def _tied(walk: EnginePass, following: Following, around: Form) -> Iterator[Instant]:
    """Yield the sum of the gradients of a tied embedding and head: DeepSpeed's own product forms the head's as it lies."""
    # Source: ``LinearFunctionForZeroStage3`` in deepspeed/runtime/zero/linear.py (0.19.8).
    for instant in tied_gradients(walk, following, around):
        if walk.taped.settings.loss in TOKEN_CHUNKS or instant.operation != TIED_SUM:
            yield instant


def through_forward(walk: EnginePass, following: Following, played: PlayedModel) -> Generator[Instant, None, Form]:
    """Yield the moments of forward, of layers alike those beside which the most is gathered; return what it leaves."""
    inputs, taped = walk.inputs, walk.taped
    arguments = layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked)
    named, apart = named_embeddings(inputs, taped), leaf_apart(inputs, taped)
    around = retained_graph(inputs, taped) + arguments + tables_of_graph(inputs)
    yield from following.through(walk.embedding.forward, around, "forward")
    around += apart + named + played.embedding.saved
    walked: list[tuple[int, int, list[tuple[EngineBytes, EngineBytes]]]] = []
    for kind, run in zip(taped.kinds, taped.runs, strict=True):
        for number in range(run.first, run.first + run.count):
            walked.append((kind, number, following.walk(walk.layers[kind].forward, number)))
            around += played.layers[kind].saved + stored_keys(taped, kind)
    head = around + retained_arguments(inputs) - arguments - named - forgotten_keys(taped)
    head -= tables_of_graph(inputs) if taped.lowest_turned is None else ZERO
    for kind in set(taped.kinds):
        below = around
        following.forget()
        for other, number, helds in reversed(walked):
            below -= played.layers[other].saved + stored_keys(taped, other)
            if other == kind:
                beside = returned_before(taped, kind) if number > 1 else ZERO
                yield from following.moments(walk.layers[kind].forward, helds, below + beside, "forward")
    yield from following.through(walk.head.forward, head, "forward")
    return head + played.head.saved


def _refuse(inputs: StepInputs, rules: Partitions) -> None:
    """Raise for modules whose parameters are gathered otherwise."""
    setup, spec = inputs.setup, inputs.spec
    adapter = setup.config.adapter
    what = ""
    if any(run.layer.mixture is not None for run in spec.runs):
        what = f"model: a mixture of experts ({spec.name}), whose parts are gathered together,"
    elif spec.convolves:
        what = f"model: short convolutions ({spec.name})"
    elif spec.state_space is not None:
        what = f"model: state space layers ({spec.name})"
    elif spec.linear_attention:
        what = f"model: linear attention ({spec.name})"
    elif adapter is not None and adapter.kind == "dora":
        what = "adapter.kind: dora"
    elif setup.profile.loss == "cut-cross-entropy":
        what = "kernels.loss: cut-cross-entropy, which gathers the head by itself,"
    elif family_code(setup.stack, spec.architecture).own_linear and not (adapter and setup.checkpointing == "full"):
        what = f"model: {spec.name}, whose graph keeps views of gathered weights, without LoRA and full checkpointing,"
    elif setup.config.method.reference_model == "adapter-off" and setup.checkpointing != "none":
        # What is gathered then belongs to the module whose backward has begun last, which is another.
        again = setup.stack.checkpointing.reentrant
        what = "" if again else "method.reference_model: adapter-off, beside layers that run again not reentrant,"
    elif rules.ranks == 1:
        what = "parallel.data: 1"
    if what:
        retained = rules.weight_bytes + rules.master_bytes + rules.gradient_bytes + rules.state_bytes
        retained += rules.bucket * rules.width
        raise CannotAnswerError(
            f"{setup.name}: {what} is not modelled under DeepSpeed's stage 3, where each of {rules.ranks} ranks keeps "
            f"{format_bytes(retained)} between steps; stages 1 and 2 are planned"
        )


def compile_gathered_step(inputs: StepInputs, taped: ModelOnTape) -> StepForms:
    """Return the closed forms of a training step under ZeRO 3.

    Raises:
        CannotAnswerError: A loss whose gradients leave otherwise.
    """
    rules = partitions(inputs.setup, inputs.states, inputs.spec.hidden_size)
    _refuse(inputs, rules)
    update = Temporaries(max(rules.step_bytes - rules.whole_bytes, 0), FORMULA)
    inputs = replace(inputs, optimizer=update, clipping_bytes=0)
    candidates = tuple(dominant([*GatheredStep(inputs, taped, rules).instants()]))
    return StepForms(candidates, buffers(inputs), saved_by_layers(taped), FORMULA)
