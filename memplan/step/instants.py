"""A whole training step as closed forms: what is alive at each instant, and where the peak is.

Compiling plays the tapes of the model's parts once and adds what lies around them: the layers
below keep their activations, those above have left their gradients. What comes out are a few
candidate instants, each a linear form in the quantities of :mod:`memplan.step.tapes.tape`; evaluating a
batch and a sequence length is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention, LayerRun, MixtureOfExperts
from memplan.step.blocks.block_settings import Regime, block_settings
from memplan.step.blocks.layer_sections import Section, layer_section
from memplan.step.head_and_loss import HeadSections
from memplan.step.places import Place, ends, last_places, layer_counts
from memplan.step.states.model_states import ModelStates
from memplan.step.states.muon_scratch import GRID_TABLE_BYTES
from memplan.step.states.optimizer_scratch import average_bytes, clipping_bytes, step_temporaries, stored_names
from memplan.step.tapes.linear_forms import (
    EMBEDDING_DIRECT_INDICES,
    ZERO,
    Form,
    Part,
    Quantity,
    add_forms,
    scale_form,
    single_form,
)
from memplan.step.tapes.liveness import Instant, Played, play_forward
from memplan.step.tapes.tape import NEW, SAME, Mode
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

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


def regime_of(model: Model, setup: TrainingSetup, batch: int, length: int) -> Regime:
    """Return which operations run for ``batch`` sequences of ``length`` tokens; what changes nothing is left at its default."""
    tokens, chunks = batch * length, setup.profile.loss_chunks
    eager = any(_steps_through_scores(run.layer.attention) for run in model.spec.runs)
    return Regime(
        one_sequence=batch == 1 and (eager or setup.profile.attention == "math" or model.spec.learned_positions > 0),
        one_token=length == 1,
        one_chunk=setup.profile.loss == "chunked" and ceil_div(tokens, chunks) == tokens,
        sorts_positions=model.spec.learned_positions > 0 and length > EMBEDDING_DIRECT_INDICES,
    )


def compile_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> StepForms:
    """Return the closed forms of a training step.

    Raises:
        CannotAnswerError: A part of the model whose activations are not modelled.
    """
    compiler = StepCompiler(model, setup, states, regime)
    candidates = tuple(compiler.instants())
    return StepForms(candidates, compiler.buffers(), compiler.saved(), compiler.optimizer.formula)


class StepCompiler(HeadSections):
    """Joins the tapes of embedding, layers and head."""

    def __init__(self, model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> None:
        self.model, self.setup, self.states, self.regime = model, setup, states, regime
        self.spec = model.spec
        self.kept_all = states.gradient_bytes
        self.emptied = stored_names(setup, states.tensors)
        self.checkpointing = setup.config.activation_checkpointing
        self.settings = block_settings(self.spec, setup, regime)
        self.optimizer = step_temporaries(setup, states.tensors)
        by_name = {entry.tensor.name: entry for entry in states.tensors}  # equal in all runs of layers that have it
        self.weights = {name: self._weight(entry) for name, entry in by_name.items()}
        self.embedding = self._embedding()
        self.layer_runs: list[LayerRun] = []
        self.layer_sections: dict[tuple[object, ...], Section] = {}
        self.names_by_first: dict[int, list[str]] = {}
        for entry in states.tensors:
            self.names_by_first.setdefault(entry.tensor.first, []).append(entry.tensor.name)
        self.runs: list[Section] = []
        self._add_runs()
        self.runs_output = self.runs[-1].output
        self.head = self._head()

    # ---------------------------------------------------------------- sections
    def _embedding(self) -> Section:
        builder = self._builder()
        tape, names = builder.tape, self.spec.names
        tape.instant = "end of backward"
        weight = replace(builder.weight(f"{names.embedding}.weight"), copy_bytes=0)
        if self.spec.tie_word_embeddings and weight.trainable:
            # What becomes of the sum of both gradients is in _tied_sum; coded ones are stored one by one.
            waits = replace(weight, delayed=True, converted=False, gradient_bytes=weight.formed_bytes)
            weight = replace(weight, shared=True) if weight.coded else waits
        entry = tape.part_of(TOKENS, 1, 8, needs_gradient=False)
        x = tape.value(TOKENS, self.spec.hidden_size, self.setup.residual_bytes)
        sums = [
            (Quantity.SORTED_TOKENS, 24),
            (Quantity.TOUCHED_ROWS, 16),
            (Quantity.PARTIAL_SUMS, 8 + 4 * self.spec.hidden_size),
        ]
        tape.apply("embedding", [], x, weights=[weight], workspace=sums)
        if self.spec.learned_positions:
            table = builder.weight(f"{names.positions}.weight")
            rows = tape.value(Quantity.POSITIONS, self.spec.hidden_size, self.setup.residual_bytes)
            with tape.holding(x):
                tape.apply("position embedding", [], rows, weights=[table], workspace=self._position_sums())
                ways = [(x, SAME), (rows, SAME if self.regime.one_sequence else NEW)]
                x = tape.apply("add", ways, builder.fresh(x), packs=False)
        if self.spec.embedding_scale:
            x = builder.pointwise("scale", x)
        x = builder.dropped(x)
        return Section(tape, entry, x)

    def _position_sums(self) -> list[tuple[Quantity, int]]:
        """Return what sorting positions takes, each of which occurs once: partial sums are one for each, and for ten."""
        sums = 8 + 4 * self.spec.hidden_size
        return [(Quantity.POSITIONS, 24 + 16 + sums + ceil_div(sums, 10))] if self.regime.sorts_positions else []

    def _add_runs(self) -> None:
        """Put every run of equal layers on tape; a first layer whose input needs no gradient may stand alone."""
        needs = self.embedding.output.needs_gradient
        for run in self.spec.runs:
            first = self._layer(run, needs)
            trained = first.output.needs_gradient
            if trained == needs or run.count == 1:
                self.layer_runs.append(run)
                self.runs.append(first)
            else:
                rest = LayerRun(run.layer, run.count - 1, run.first + 1)
                self.layer_runs += [LayerRun(run.layer, 1, run.first), rest]
                self.runs += [first, self._layer(rest, trained)]
            needs = self.runs[-1].output.needs_gradient

    def _layer(self, run: LayerRun, needs_gradient: bool) -> Section:
        """Return one layer of a run on tape; equal layers of several runs share theirs."""
        names = self.names_by_first.get(self._inventory_first(run), ())
        key = (run.layer, needs_gradient, *names)
        if key not in self.layer_sections:
            prefix = f"{self.spec.names.layer}."
            weights = tuple(
                (name.removeprefix(prefix), self.weights[name]) for name in names if name.startswith(prefix)
            )
            self.layer_sections[key] = layer_section(self.settings, run.layer, weights, needs_gradient)
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
        return sum(GRID_TABLE_BYTES.get(codec or "", 0) for codec in {entry.codec for entry in self.states.tensors})

    def _expert_offset_bytes(self) -> int:
        """Return the offsets that steer the choice of experts, one fp32 number each, which are no parameters."""
        parts = [(run.layer.feed_forward, run.count) for run in self.spec.runs]
        return sum(
            4 * p.num_experts * count for p, count in parts if isinstance(p, MixtureOfExperts) and p.score_correction
        )

    def saved(self) -> tuple[tuple[str, tuple[tuple[str, Quantity, int, Part], ...]], ...]:
        """Return, for each run of layers, the tensors that one of its layers keeps."""
        return tuple(
            (f"{run.count} x layer {run.first + 1}", section.saved_tensors)
            for run, section in zip(self.layer_runs, self.runs, strict=True)
        )

    def _play(self, section: Section, mode: Mode) -> Played:
        return section.played(mode, self.checkpointing)

    # ---------------------------------------------------------------- instants
    def instants(self) -> Iterator[Instant]:
        """Yield the candidates for the peak."""
        config = self.setup.config
        present = config.zero_gradients == "fill"
        mode: Mode = "layer" if config.gradients.lifetime == "layer" else "filled" if present else "first"
        base = self._constant(Part.GRADIENTS, self._filled_bytes() if present else 0)
        yield from self._pass(base, mode)
        if config.gradient_accumulation_steps > 1:
            again = self._constant(Part.GRADIENTS, self.kept_all)
            for instant in self._pass(again, "again"):
                yield instant.around(ZERO, "second backward", f"{instant.operation} ({instant.name})")
        yield from self._after_backward()

    def _filled_bytes(self) -> int:
        """Return the gradients that a step leaves, filled with zeros."""
        stored = (e.gradient_bytes * e.tensor.count for e in self.states.tensors if e.tensor.name in self.emptied)
        return self.kept_all - sum(stored)

    def _pass(self, base: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the instants of one forward and backward; ``base`` is there throughout."""
        layers = {id(section): self._play(section, mode) for section in self.layer_sections.values()}
        played = [layers[id(section)] for section in self.runs]
        embedding, head = self._play_ends(mode)
        yield from self._forward(base, embedding, played, head)
        saved = self._saved(embedding, played)
        base = add_forms(base, self._constant(Part.TEMPORARIES, self._root_bytes()))
        yield from self._head_instants(head, add_forms(base, saved), mode)
        formed = self._head_left(mode) or self._delayed_bytes()
        places, formed = self._places(formed, mode)
        bare = add_forms(base, embedding.kept)

        def around_of(place: Place) -> Form:
            below = (scale_form(layers[key].kept, count) for key, count in place.below.items())
            return add_forms(bare, *below, self._constant(Part.GRADIENTS, place.formed))

        for place in ends(places, around_of):
            around, name = around_of(place), f"layer {place.layer} backward"
            for moment in layers[place.kind[0]].backward:
                yield moment.around(around, name)
        around = add_forms(base, self._constant(Part.GRADIENTS, formed))
        yield from self._tied_sum(around, mode)
        for moment in embedding.backward:
            yield moment.around(around, "end of backward")

    def _places(self, formed: int, mode: Mode) -> tuple[list[Place], int]:
        """Return the last and the first layer of each run, in the order of backward, and all gradients formed in the end.

        Args:
            formed: Gradients that the head has left.
            mode: What becomes of weight gradients.
        """
        places: list[Place] = []
        below = layer_counts(zip(map(id, self.runs), self.layer_runs, strict=True))
        for section, run in zip(reversed(self.runs), reversed(self.layer_runs), strict=True):
            key, left = id(section), section.left(mode)
            below[key] -= run.count
            for position in dict.fromkeys((run.count, 1)):
                counts = {**below, key: below[key] + position - 1}
                above = formed + left * (run.count - position)
                places.append(Place((key, run.count, position), run.first + position, counts, above))
            formed += left * run.count
        return places, formed

    def _play_ends(self, mode: Mode) -> tuple[Played, Played]:
        """Return embedding and head, played."""
        return self.embedding.played(mode), self.head.played(mode)

    def _saved(self, embedding: Played, played: Sequence[Played]) -> Form:
        """Return what embedding and layers leave for backward."""
        kept = {id(part): part.kept for part in played}
        counts = layer_counts(zip(map(id, played), self.layer_runs, strict=True))
        return add_forms(embedding.kept, *(scale_form(kept[key], count) for key, count in counts.items()))

    def _forward(self, around: Form, embedding: Played, played: Sequence[Played], head: Played) -> Iterator[Instant]:
        """Yield the moments of forward: of the embedding, the last layer of each kind, and the head."""
        for moment in embedding.forward:
            yield moment.around(around, "forward")
        layers = zip(played, self.layer_runs, strict=True)
        left = [(part, run.count, add_forms(part.kept, part.carried)) for part, run in layers]
        places, around = last_places(left, add_forms(around, embedding.kept, embedding.carried))
        for part, below in places:
            for moment in part.forward:
                yield moment.around(below, "forward")
        yield from self._head_forward(head, around)

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
        kept = self._constant(Part.GRADIENTS, self._filled_bytes()) if config.zero_gradients == "fill" else ZERO
        if config.weight_average != "none" and config.gradients.lifetime == "step":
            scratch = self._constant(Part.TEMPORARIES, average_bytes(self.setup, self.states.tensors))
            yield Instant("optimizer step", "moving average", add_forms(kept, scratch))
        if config.evaluation:
            yield from self._evaluation(kept)
        if config.save_checkpoint:
            yield Instant("checkpoint saving", "state_dict", kept)

    def _evaluation(self, around: Form) -> Iterator[Instant]:
        """Yield the moments of a forward without gradients, whose loss is over all logits at once."""
        sections = [self.embedding, *self.runs]
        counts = [1, *(run.count for run in self.layer_runs)]
        parts = [section.evaluated() for section in sections]
        left = [(part, count, part.carried) for part, count in zip(parts, counts, strict=True)]
        places, around = last_places(left, around)
        for part, below in places:
            for moment in part.forward:
                yield moment.around(below, "evaluation")
        builder = self._builder()
        entry = self._stream(builder.tape)
        x = builder.norm(entry, self.spec.final_norm, self.spec.names.final_norm, self.spec.hidden_size)
        with builder.tape.holding(x):
            self._loss(builder, x, wide=self.setup.profile.loss != "bf16")
        for moment in play_forward(builder.tape).forward:
            yield moment.around(around, "evaluation")


def _steps_through_scores(part: Attention | LatentAttention) -> bool:
    """Whether attention runs step by step, which takes a mask of one byte per pair of positions."""
    return isinstance(part, Attention) and (part.sinks or part.logit_softcap > 0)
