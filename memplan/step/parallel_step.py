"""A training step under torch's ``fully_shard``: what is gathered and reduced lies around the same tapes.

Each layer is a unit, and the root is one with embedding, final norm and head. A unit's weights are
gathered into one buffer, then copied out of it into whole tensors; its gradients are formed whole,
copied into one buffer, reduced and scattered. The root stays gathered from the beginning of forward
to the end of backward, and its gradients stay whole as long. In backward the next unit is gathered
while one runs, and the buffer that its gradients were reduced from lives until the next reduction.

Source:
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``wait_for_unshard``, ``post_backward``,
    ``_backward_prefetch``), _fsdp_state.py (``_root_post_backward_final_callback``) and
    _fsdp_collectives.py (v2.13.0); the loss lies outside the root, as in torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan.model.model import Model
from memplan.model.spec import LayerRun
from memplan.step.blocks.block_settings import Regime
from memplan.step.head_and_loss import TOKENS
from memplan.step.instants import StepCompiler, StepForms
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.optimizer_scratch import step_temporaries
from memplan.step.states.parallel_shards import Unit, gathered_setup, unit
from memplan.step.tapes.linear_forms import Form, Part, add_forms, scale_form, single_form
from memplan.step.tapes.liveness import Instant, Played
from memplan.step.tapes.tape import Mode
from memplan.training.resolved import TrainingSetup


def compile_sharded_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> StepForms:
    """Return the closed forms of one rank's training step.

    Args:
        model: The model.
        setup: The training setup, with ``zero_stage: 3``.
        states: What the rank holds.
        regime: Which operations run.
    """
    compiler = _ShardedCompiler(model, setup, states, regime)
    candidates = tuple(compiler.instants())
    return StepForms(
        candidates,
        compiler.buffers(),
        compiler.saved(),
        compiler.optimizer.formula,
        compiler.stream_bytes(),
        compiler.unit_gradients(),
    )


class _ShardedCompiler(StepCompiler):
    """Plays the tapes of gathered weights, with shards, gathered weights and reduced gradients around them."""

    def __init__(self, model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> None:
        whole = gathered_setup(setup)
        super().__init__(model, whole, model_states(whole, model.inventory, ()), regime)
        self.kept_all = states.gradient_bytes
        self.optimizer = step_temporaries(setup, states.tensors)
        self.root = unit([tensor for tensor in model.inventory if "{}" not in tensor.name], setup)
        layers = [tensor for tensor in model.inventory if "{}" in tensor.name]
        self.units = [
            unit([tensor for tensor in layers if tensor.first == self._inventory_first(run)], setup)
            for run in self.layer_runs
        ]
        self.last = self.units[-1]

    def stream_bytes(self) -> int:
        """Return the buffers that weights are gathered into, which come from the memory of a stream of their own.

        Two are alive at a time: the root's and the first layer's, or those of two layers.
        """
        sizes = [self.root.gathered_bytes, *(unit.gathered_bytes for unit in self.units)]
        return max(sizes[0] + sizes[1], 2 * max(sizes[1:]))

    def unit_gradients(self) -> tuple[int, ...]:
        """Return the rank's gradients of each unit, which are one tensor: what a reduction puts out."""
        layers = zip(self.units, self.layer_runs, strict=True)
        return (self.root.kept_bytes, *(unit.kept_bytes for unit, run in layers for _ in range(run.count)))

    def _instant(self, name: str, operation: str, form: Form, communication: int) -> Instant:
        return Instant(name, operation, add_forms(form, self._constant(Part.TEMPORARIES, communication)), communication)

    def _pass(self, base: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the instants of one forward and backward; whole gradients are always new ones."""
        layers = {id(section): self._play(section, "first") for section in self.layer_sections.values()}
        played = [layers[id(section)] for section in self.runs]
        embedding, head = self._play_ends("first")
        saved = self._saved(embedding, played)
        yield from self._forward_instants(base, saved, embedding, played)
        base = add_forms(base, self._constant(Part.TEMPORARIES, self._root_bytes()))
        yield from self._head_unit(head, add_forms(base, saved))
        whole = self.head.gradients or self._delayed_bytes()
        yield from self._layer_units(base, saved, played, whole, mode)
        kept = self._stays(sum(u.kept_bytes * r.count for u, r in zip(self.units, self.layer_runs, strict=True)), mode)
        yield from self._root_unit(embedding, add_forms(base, self._constant(Part.GRADIENTS, kept)), whole)

    def _forward_instants(self, base: Form, saved: Form, embedding: Played, played: list[Played]) -> Iterator[Instant]:
        """Yield the layers' forward, the copies of the first and of the last layer out of their buffers, and the loss.

        A unit's buffer lives until the next unit has been copied out of its own; the last one until
        forward ends. The model's own logits stay until the loss is known.
        """
        root, entry = self.root.gathered_bytes, self.embedding.output
        x = single_form(Part.ACTIVATIONS, TOKENS, entry.coefficient)
        first = 2 * root + 2 * self.units[0].gathered_bytes
        yield self._instant("forward", "copy of the first layer", add_forms(base, x), first)
        yield from self._layers_forward(add_forms(base, embedding.kept), played)
        under = self._neighbour(len(self.units) - 1, self.layer_runs[-1].count, -1)
        if under:
            form = add_forms(base, saved, scale_form(played[-1].kept, -1), x)
            held = root + 2 * self.last.gathered_bytes + under.gathered_bytes
            yield self._instant("forward", "copy of the last layer", form, held)
        yield from self._loss_forward(add_forms(base, saved))

    def _layers_forward(self, around: Form, played: list[Played]) -> Iterator[Instant]:
        """Yield the forward of the first and of the last layer of each run, whose buffer is still there."""
        for run, part, own in zip(self.layer_runs, played, self.units, strict=True):
            for position in dict.fromkeys((0, run.count - 1)):
                below = add_forms(around, scale_form(part.kept, position))
                held = self.root.gathered_bytes + 2 * own.gathered_bytes
                for moment in part.forward:
                    yield self._instant("forward", moment.operation, add_forms(below, moment.form), held)
            around = add_forms(around, scale_form(part.kept, run.count))

    def _loss_forward(self, around: Form) -> Iterator[Instant]:
        """Yield the head's product, which is the model's last, and the loss outside it."""
        root = self.root.gathered_bytes
        inputs = next(n.inputs[0][0] for n in self.head.tape.nodes if n.name == "log_softmax")
        logits = single_form(Part.LOGITS, inputs.quantity, inputs.width * self.setup.compute_bytes)
        read = single_form(Part.LOGITS, inputs.quantity, inputs.coefficient)
        loss = self._constant(Part.LOGITS, self._loss_bytes())
        form = add_forms(around, self.head.tape.saved_form(), read, loss)
        form = form if self.setup.profile.loss == "bf16" else add_forms(form, logits)
        yield self._instant("forward", "log_softmax", form, root)
        product = add_forms(
            around,
            logits,
            *(single_form(Part.ACTIVATIONS, v.quantity, v.coefficient) for v in (self.head.entry, self.normed)),
        )
        yield self._instant("forward", "head", product, root + self.last.gathered_bytes)

    def _head_unit(self, head: Played, around: Form) -> Iterator[Instant]:
        """Yield the backward of loss and head, from whose start on the last layer is gathered."""
        for instant in self._head_instants(head, around, "first"):
            ahead = 0 if instant.name == "loss backward" else self.last.gathered_bytes
            yield self._with(instant, self.root.gathered_bytes + ahead)

    def _with(self, instant: Instant, communication: int) -> Instant:
        """Return an instant with gathered weights and reduced gradients around it."""
        around = instant.around(self._constant(Part.TEMPORARIES, communication))
        return replace(around, communication=communication)

    def _layer_units(self, base: Form, saved: Form, played: list[Played], whole: int, mode: Mode) -> Iterator[Instant]:
        """Yield the backward of the layers: the last and the first of each run, and their neighbours."""
        kept = 0
        for index in reversed(range(len(self.runs))):
            part, run, own = played[index], self.layer_runs[index], self.units[index]
            rest = add_forms(saved, scale_form(part.kept, -run.count))
            for position in self._positions(run):
                above = whole + kept + self._stays(own.kept_bytes, mode) * (run.count - position)
                left = add_forms(base, rest, scale_form(part.kept, position - 1))
                around = add_forms(left, self._constant(Part.GRADIENTS, above))
                yield from self._layer_unit(index, position, around, part)
            kept += self._stays(own.kept_bytes, mode) * run.count
            saved = rest

    def _positions(self, run: LayerRun) -> tuple[int, ...]:
        """Return the layers of a run that are looked at: between them, everything is linear."""
        return tuple(dict.fromkeys((run.count, max(1, run.count - 1), min(2, run.count), 1)))

    def _layer_unit(self, index: int, position: int, around: Form, played: Played) -> Iterator[Instant]:
        """Yield the backward of one layer: gathered, run, its gradients reduced."""
        own, run = self.units[index], self.layer_runs[index]
        over = self._neighbour(index, position, 1)
        under = self._neighbour(index, position, -1)
        name = f"layer {run.first + position} backward"
        named = position + 1 in self._positions(run) or position == run.count
        before = f"layer {run.first + position + named} backward" if over else "head backward"
        root, waiting = self.root.gathered_bytes, over.reduced_bytes if over else 0
        ahead = under.gathered_bytes + under.cast_bytes if under else 0
        arrived = single_form(Part.TEMPORARIES, TOKENS, self.head.entry.coefficient)
        form = add_forms(around, played.kept, arrived)
        gathered = root + waiting + own.gathered_bytes + max(own.gathered_bytes, ahead)
        yield self._instant(before, "copy out of the gathered buffer", form, gathered)
        for instant in played.backward:
            held = root + waiting + own.gathered_bytes + (under.gathered_bytes if under else 0)
            yield self._with(instant.around(around, name), held)
        section = self.runs[index]
        form = add_forms(around, arrived, self._constant(Part.GRADIENTS, section.gradients))
        communication = root + own.reduced_bytes + (under.gathered_bytes if under else 0)
        yield self._instant(name, "copy into the buffer of the reduction", form, communication)
        form = add_forms(around, arrived, self._constant(Part.GRADIENTS, own.kept_bytes + own.last_bytes))
        yield self._instant(name, "reduction", form, communication)

    def _neighbour(self, index: int, position: int, step: int) -> Unit | None:
        """Return the unit of the layer that comes after (1) or before (-1), or None."""
        if 1 <= position + step <= self.layer_runs[index].count:
            return self.units[index]
        other = index + step
        return self.units[other] if 0 <= other < len(self.units) else None

    def _root_unit(self, embedding: Played, around: Form, whole: int) -> Iterator[Instant]:
        """Yield the embedding's backward, and the reduction of the root's gradients at the very end."""
        first = self.units[0]
        communication = self.root.gathered_bytes + first.reduced_bytes
        formed = add_forms(around, self._constant(Part.GRADIENTS, whole))
        for instant in self._tied_sum(formed, "first"):
            yield self._instant(instant.name, instant.operation, instant.form, communication)
        for instant in embedding.backward:
            yield self._with(instant.around(formed, "end of backward"), communication)
        for size in (self._root_gradients(), self.root.kept_bytes + self.root.last_bytes):
            form = add_forms(around, self._constant(Part.GRADIENTS, size))
            yield self._instant("end of backward", "reduction of the root", form, self.root.reduced_bytes)

    def _root_gradients(self) -> int:
        """Return the whole gradients of embedding, final norm and head; a tied one counts once."""
        return sum(entry.formed_bytes for entry in self.states.tensors if "{}" not in entry.tensor.name)
