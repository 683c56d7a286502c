"""A whole training step as closed forms: what is alive at each instant, and where the peak is.

Compiling plays the tapes of the model's parts once and adds what lies around them: the layers
below keep their activations, those above have left their gradients. What comes out are a few
candidate instants, each a linear form in the quantities of :mod:`memplan.tape`; evaluating a
batch and a sequence length is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memplan.chunks import GRID_TABLE_BYTES
from memplan.forms import ZERO, Form, Part, Quantity, add_forms, scale_form, single_form
from memplan.head import HeadSections, Section
from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention, LayerRun, MixtureOfExperts
from memplan.playback import Instant, dominant, play_backward
from memplan.setup import TrainingSetup
from memplan.states import ModelStates
from memplan.tape import NEW, SAME, Mode, Value
from memplan.updates import clipping_bytes, step_temporaries

TOKENS, ONE = Quantity.TOKENS, Quantity.ONE
LOSS_SCALE_BYTES = 8
"""Scale and growth tracker, which stay; unscaling makes an inverse and a flag for overflow besides.

Source: torch/amp/grad_scaler.py (v2.13.0).
"""


@dataclass(frozen=True, slots=True)
class StepForms:
    """A training step in closed form.

    Attributes:
        candidates: Instants of which one is the peak; forms without what is always there.
        buffers: Rotary tables, token ids and targets.
        layer_saved: What one layer of each run keeps for backward, tensor by tensor.
        optimizer_formula: How the optimizer's temporaries come about.
        stream_bytes: Buffers of collectives that stay with a stream of their own and that, at the peak,
            the rest of the step may not be able to use.
        unit_gradients: Sizes of the tensors that hold a rank's gradients, where they are held unit by unit.
    """

    candidates: tuple[Instant, ...]
    buffers: Form
    layer_saved: tuple[tuple[str, tuple[tuple[str, Quantity, int, Part], ...]], ...]
    optimizer_formula: str
    stream_bytes: int = 0
    unit_gradients: tuple[int, ...] = ()


def compile_step(model: Model, setup: TrainingSetup, states: ModelStates) -> StepForms:
    """Return the closed forms of a training step.

    Raises:
        CannotAnswerError: A part of the model whose activations are not modelled.
    """
    compiler = StepCompiler(model, setup, states)
    candidates = tuple(compiler.instants())
    return StepForms(candidates, compiler.buffers(), compiler.saved(), compiler.optimizer.formula)


class StepCompiler(HeadSections):
    """Joins the tapes of embedding, layers and head."""

    def __init__(self, model: Model, setup: TrainingSetup, states: ModelStates) -> None:
        self.model, self.setup, self.states = model, setup, states
        self.spec = model.spec
        self.kept_all = states.gradient_bytes
        self.checkpointing = setup.config.activation_checkpointing
        dropout = setup.config.dropout
        self.dropout = self.spec.dropout if dropout is None else dropout
        self.optimizer = step_temporaries(setup, states.tensors)
        by_name = {entry.tensor.name: entry for entry in states.tensors}  # equal in all runs of layers that have it
        self.weights = {name: self._weight(entry) for name, entry in by_name.items()}
        self.embedding = self._embedding()
        self.layer_runs = self._layer_runs()
        self.layer_sections: dict[tuple[object, ...], Section] = {}
        self.runs = [self._layer(run) for run in self.layer_runs]
        self.head = self._head()

    # ---------------------------------------------------------------- sections
    def _embedding(self) -> Section:
        builder = self._builder("")
        tape, names = builder.tape, self.spec.names
        tape.instant = "end of backward"
        weight = replace(builder.weight(f"{names.embedding}.weight"), copy_bytes=0)
        if self.spec.tie_word_embeddings and weight.trainable:
            # What becomes of the sum of both gradients is in _tied_sum; coded ones are stored one by one.
            waits = replace(weight, delayed=True, converted=False, gradient_bytes=weight.formed_bytes)
            weight = replace(weight, shared=True) if weight.coded else waits
        entry = tape.value(TOKENS, 1, 8, needs_gradient=False)
        x = self._stream(tape)
        sums = [
            (Quantity.SORTED_TOKENS, 24),
            (Quantity.TOUCHED_ROWS, 16),
            (Quantity.PARTIAL_SUMS, 8 + 4 * self.spec.hidden_size),
        ]
        tape.apply("embedding", [], x, weights=[weight], workspace=sums)
        if self.spec.learned_positions:
            table = builder.weight(f"{names.positions}.weight")
            rows = tape.value(Quantity.POSITIONS, self.spec.hidden_size, self.setup.residual_bytes)
            tape.apply("position embedding", [], rows, weights=[table])
            x = tape.apply("add", [(x, SAME), (rows, NEW)], builder.fresh(x))
        if self.spec.embedding_scale:
            x = builder.pointwise("scale", x)
        x = builder.dropped(x)
        return Section(tape, entry, x, self._gradients(tape))

    def _layer_runs(self) -> list[LayerRun]:
        """Return the runs of equal layers; a first layer whose input needs no gradient stands alone."""
        runs = list(self.spec.runs)
        if not self.embedding.output.needs_gradient and runs[0].count > 1:
            first = runs[0]
            runs[:1] = [LayerRun(first.layer, 1, first.first), LayerRun(first.layer, first.count - 1, first.first + 1)]
        return runs

    def _layer(self, run: LayerRun) -> Section:
        """Return one layer of a run on tape; equal layers of several runs share theirs."""
        builder = self._builder(f"{self.spec.names.layer}.", self._inventory_first(run))
        needs_gradient = self.embedding.output.needs_gradient or run.first > 0
        key = (run.layer, needs_gradient, *builder.weights.values())
        if key not in self.layer_sections:
            builder.tape.instant = "layer"
            entry = self._stream(builder.tape, needs_gradient)
            output = builder.layer(entry, run.layer)
            self.layer_sections[key] = Section(builder.tape, entry, output, self._gradients(builder.tape))
        return self.layer_sections[key]

    def _inventory_first(self, run: LayerRun) -> int:
        """Return the first layer of the inventory's run that ``run`` lies in."""
        return max(other.first for other in self.spec.runs if other.first <= run.first)

    # ---------------------------------------------------------------- what lies around
    def buffers(self) -> Form:
        """Return token ids, targets, positions and rotary tables."""
        form = single_form(Part.ACTIVATIONS, TOKENS, 16)
        parts = [run.layer.attention for run in self.spec.runs]
        width = max(part.rotary_dim if isinstance(part, Attention) else part.qk_rope_head_dim for part in parts)
        tables = 2 * width * self.setup.compute_bytes * self.spec.rotary_tables if width else 0
        positions = 8 if self.spec.learned_positions else 0
        scale = self._constant(Part.ACTIVATIONS, LOSS_SCALE_BYTES if self.setup.config.loss_scaling else 0)
        form = add_forms(form, self._constant(Part.ACTIVATIONS, self._expert_offset_bytes() + self._table_bytes()))
        if any(_steps_through_scores(run.layer.attention) for run in self.spec.runs):
            form = add_forms(form, single_form(Part.ACTIVATIONS, Quantity.SQUARE, 1))
        return add_forms(form, scale, single_form(Part.ACTIVATIONS, Quantity.POSITIONS, tables + positions))

    def _table_bytes(self) -> int:
        """Return the tables that grid formats are decoded with, once for each format."""
        return sum(GRID_TABLE_BYTES.get(name, 0) for name in {entry.format_name for entry in self.states.tensors})

    def _expert_offset_bytes(self) -> int:
        """Return the offsets that steer the choice of experts, one fp32 number each, which are no parameters."""
        parts = [(run.layer.feed_forward, run.count) for run in self.spec.runs]
        return sum(
            4 * p.num_experts * count for p, count in parts if isinstance(p, MixtureOfExperts) and p.score_correction
        )

    def saved(self) -> tuple[tuple[str, tuple[tuple[str, Quantity, int, Part], ...]], ...]:
        """Return, for each run of layers, the tensors that one of its layers keeps."""
        return tuple(
            (f"{run.count} x layer {run.first + 1}", tuple(section.tape.saved_tensors()))
            for run, section in zip(self.layer_runs, self.runs, strict=True)
        )

    def _kept(self, section: Section) -> Form:
        """Return what a layer leaves alive after forward."""
        if self.checkpointing == "full":
            return single_form(Part.ACTIVATIONS, section.entry.quantity, section.entry.coefficient)
        if self.checkpointing == "selective":
            return add_forms(
                self._products(section),
                single_form(Part.ACTIVATIONS, section.entry.quantity, section.entry.coefficient),
            )
        return section.tape.saved_form()

    def _products(self, section: Section) -> Form:
        """Return the results of matrix products and attention, which selective checkpointing keeps."""
        form = ZERO
        for node in section.tape.nodes:
            if node.name.startswith(("linear", "attention", "scores", "weighted sum")):
                for value in node.outputs:
                    form = add_forms(form, single_form(Part.ACTIVATIONS, value.quantity, value.coefficient))
            if node.name == "attention":
                for storage in node.saved[-2:]:
                    form = add_forms(form, single_form(*section.tape.storages[storage]))
        return form

    def _held(self, section: Section) -> Sequence[Value]:
        """Return what checkpointing holds on to while a layer's backward runs.

        Selective checkpointing keeps the result of the last product, which recomputing, since it
        stops once everything that backward needs is there, never asks for.
        """
        if self.checkpointing == "none":
            return ()
        last = next(n for n in reversed(section.tape.nodes) if n.name.startswith("linear"))
        return (section.entry, last.outputs[0]) if self.checkpointing == "selective" else (section.entry,)

    def _play(self, section: Section, mode: Mode) -> list[Instant]:
        return dominant(play_backward(section.tape, section.output, mode, self._held(section)))

    # ---------------------------------------------------------------- instants
    def instants(self) -> Iterator[Instant]:
        """Yield the candidates for the peak."""
        config = self.setup.config
        present = config.zero_gradients == "fill"
        mode: Mode = "layer" if config.gradients.lifetime == "layer" else "again" if present else "first"
        base = self._constant(Part.GRADIENTS, self.kept_all if present else 0)
        yield from self._pass(base, mode)
        if config.gradient_accumulation_steps > 1:
            again = self._constant(Part.GRADIENTS, self.kept_all)
            for instant in self._pass(again, "again"):
                yield Instant("second backward", f"{instant.operation} ({instant.name})", instant.form)
        yield from self._after_backward()

    def _pass(self, base: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the instants of one forward and backward; ``base`` is there throughout."""
        below = [self._kept(section) for section in self.runs]
        saved = add_forms(
            self.embedding.tape.saved_form(), *map(scale_form, below, (run.count for run in self.layer_runs))
        )
        root = self._constant(Part.TEMPORARIES, self._root_bytes())
        yield self._forward(add_forms(base, saved))
        base = add_forms(base, root)
        yield from self._head_instants(add_forms(base, saved), mode)
        formed = self._stays(self.head.gradients + self._chunked_gradients(), mode) or self._delayed_bytes()
        played = {id(section): self._play(section, mode) for section in self.layer_sections.values()}
        places: list[_Place] = []
        for index in reversed(range(len(self.runs))):
            section, run = self.runs[index], self.layer_runs[index]
            rest = add_forms(saved, scale_form(below[index], -run.count))
            for position in dict.fromkeys((run.count, 1)):
                kept = add_forms(base, rest, scale_form(below[index], position - 1))
                above = formed + self._stays(section.gradients, mode) * (run.count - position)
                around = add_forms(kept, self._constant(Part.GRADIENTS, above))
                places.append(_Place((id(section), run.count, position), run.first + position, around))
            formed += self._stays(section.gradients, mode) * run.count
            saved = rest
        for place in _ends(places):
            instants, name = played[place.kind[0]], f"layer {place.layer} backward"
            yield from (Instant(name, i.operation, add_forms(place.around, i.form)) for i in instants)
        around = add_forms(base, self._constant(Part.GRADIENTS, formed))
        yield from self._tied_sum(around, mode)
        for instant in dominant(play_backward(self.embedding.tape, self.embedding.output, mode)):
            yield Instant("end of backward", instant.operation, add_forms(around, instant.form))

    def _after_backward(self) -> Iterator[Instant]:
        config = self.setup.config
        gradients = self._constant(Part.GRADIENTS, 0 if config.gradients.lifetime == "layer" else self.kept_all)
        if config.gradients.lifetime == "step":
            scaling = LOSS_SCALE_BYTES if config.loss_scaling else 0
            update = self._constant(Part.TEMPORARIES, max(self.optimizer.bytes, scaling))
            yield Instant("optimizer step", "update", add_forms(gradients, update))
        if config.clip_gradients:
            scratch = self._constant(Part.TEMPORARIES, clipping_bytes(self.states.tensors))
            yield Instant("gradient clipping", "norms", add_forms(gradients, scratch))
        kept = gradients if config.zero_gradients == "fill" else ZERO
        if config.evaluation:
            yield Instant("evaluation", "log_softmax", add_forms(kept, self._evaluation()))
        if config.save_checkpoint:
            yield Instant("checkpoint saving", "state_dict", kept)

    def _evaluation(self) -> Form:
        """Return what a forward without gradients holds at its loss: hidden states, logits and their logarithms."""
        hidden = single_form(Part.ACTIVATIONS, TOKENS, self.spec.hidden_size * 2 * self.setup.residual_bytes)
        wide = 4 if self.setup.profile.loss != "bf16" or self.setup.autocast else self.setup.compute_bytes
        logits = single_form(Part.LOGITS, TOKENS, 2 * wide * self.spec.vocab_size)
        return add_forms(hidden, logits, self._constant(Part.LOGITS, 2 * self._loss_bytes()))


@dataclass(frozen=True, slots=True)
class _Place:
    """A layer whose backward may be the peak: its kind and place in its run, its number, what lies around it."""

    kind: tuple[int, int, int]
    layer: int
    around: Form


def _ends(places: Sequence[_Place]) -> Iterator[_Place]:
    """Yield the places that can be the fullest of their kind.

    One that lies midway between its neighbours of the same kind needs no more than the fuller of
    them, whatever the quantities are, since forms are linear. Layers that alternate are such.
    """
    kinds: dict[tuple[int, int, int], list[_Place]] = {}
    for place in places:
        kinds.setdefault(place.kind, []).append(place)
    midway = {
        here.layer
        for group in kinds.values()
        for before, here, after in zip(group, group[1:], group[2:], strict=False)
        if add_forms(before.around, after.around) == scale_form(here.around, 2)
    }
    return (place for place in places if place.layer not in midway)


def _steps_through_scores(part: Attention | LatentAttention) -> bool:
    """Whether attention runs step by step, which takes a mask of one byte per pair of positions."""
    return isinstance(part, Attention) and (part.sinks or part.logit_softcap > 0)
