"""Final norm, head and loss of a training step: their tape, and the instants around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from memplan.model.spec import ModelSpec
from memplan.step.blocks.block_settings import BlockSettings, Regime
from memplan.step.blocks.decoder_layer import Builder
from memplan.step.blocks.layer_sections import Section
from memplan.step.states.model_states import ModelStates, TensorStates
from memplan.step.states.muon_scratch import decoding_bytes
from memplan.step.states.optimizer_scratch import handed_over, store_bytes, tensor_temporaries
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, add_forms, scale_form, single_form
from memplan.step.tapes.liveness import Instant, Played
from memplan.step.tapes.tape import NEW, SAME, Mode, Tape, Value, Weight
from memplan.training.resolved import TrainingSetup

TOKENS, ONE = Quantity.TOKENS, Quantity.ONE


class Sections:
    """What the sections of a model have in common: weights, tapes, constants.

    Attributes:
        weights: Every parameter tensor as tapes see it, by name.
        regime: What batch and length decide.
        settings: What operations depend on.
        emptied: Names of the weights whose gradients a step takes away in any case.
    """

    spec: ModelSpec
    setup: TrainingSetup
    states: ModelStates
    weights: dict[str, Weight]
    regime: Regime
    settings: BlockSettings
    emptied: frozenset[str]

    def _weight(self, entry: TensorStates) -> Weight:
        layer = self.setup.config.gradients.lifetime == "layer"
        return Weight(
            name=entry.tensor.name,
            trainable=entry.trainable,
            element_bytes=entry.element_bytes,
            copy_bytes=entry.copy_bytes,
            copy_kept=not entry.quantized,
            own_bytes=entry.weight_bytes,
            formed_bytes=entry.formed_bytes,
            gradient_bytes=entry.gradient_bytes,
            coded=entry.quantized,
            add_bytes=store_bytes(self.setup, entry),
            converted=entry.trainable and self._is_converted(entry),
            emptied=entry.tensor.name in self.emptied,
            handed_over=not entry.quantized and handed_over(self.setup, entry),
            update_bytes=tensor_temporaries(self.setup, entry).bytes if layer and entry.trainable else 0,
            rows=entry.tensor.shape[0],
            columns=entry.tensor.shape[-1],
            foreign=entry.element_bytes == 2 == self.setup.compute_bytes
            and not entry.quantized
            and entry.format_name != self.setup.config.compute_dtype,
            decoding_bytes=decoding_bytes(entry, self.setup.compute_bytes),
        )

    def _is_converted(self, entry: TensorStates) -> bool:
        """Whether a gradient is kept in another dtype than it is formed in; two of them are equally wide."""
        formed = self.setup.config.compute_dtype if entry.quantized else entry.format_name
        narrow = entry.gradient_bytes == entry.formed_bytes == 2 * entry.tensor.elements
        return entry.gradient_bytes != entry.formed_bytes or (narrow and entry.gradient_name != formed)

    def _builder(self) -> Builder:
        """Return a builder that sees all weights."""
        return Builder(self.settings, self.weights)

    def _stream(self, tape: Tape, needs_gradient: bool = True) -> Value:
        return tape.given(TOKENS, self.spec.hidden_size, self.setup.residual_bytes, needs_gradient)

    def _constant(self, part: Part, size: int) -> Form:
        return single_form(part, ONE, size)

    def _stays(self, size: int, mode: Mode) -> int:
        return size if mode == "first" else 0


class HeadSections(Sections):
    """Final norm, head and loss.

    Attributes:
        head: Their section; a chunked loss stops at the norm.
        normed: What the head is given.
        runs_output: The residual stream after the last layer.
    """

    head: Section
    normed: Value
    runs_output: Value

    def _head(self) -> Section:
        """Return final norm, head and loss; a chunked loss stops at the norm."""
        builder = self._builder()
        tape = builder.tape
        tape.instant = "head backward"
        entry = self._stream(tape, self.runs_output.needs_gradient)
        x = builder.norm(entry, self.spec.final_norm, self.spec.names.final_norm, self.spec.hidden_size)
        self.normed = x
        if self.setup.profile.loss == "chunked":
            return Section(tape, entry, x)
        with tape.holding(x):
            output = self._loss(builder, x, wide=self.setup.profile.loss != "bf16")
        return Section(tape, entry, output)

    def _loss(self, builder: Builder, x: Value, *, wide: bool) -> Value:
        """Record head and cross-entropy on ``x``; return the loss.

        Args:
            builder: Writes on the tape.
            x: What the head is given.
            wide: Whether logits are cast to fp32 first.
        """
        tape = builder.tape
        logits = self._logits(builder, x)
        logits = builder.cast(logits, 4) if wide else logits
        with tape.holding(logits):
            logs = builder.fresh(logits)
            tape.apply("log_softmax", [(logits, NEW)], logs, [logs])
            logs = builder.cast(logs, 4) if self.setup.autocast else logs
            loss = tape.value(ONE, 0, logs.element_bytes, part=Part.LOGITS)
            total = tape.value(ONE, 1, logs.element_bytes)
            scratch = [(ONE, self._loss_bytes())]
            return tape.apply("nll_loss", [(logs, NEW)], loss, [logs, total], scratch=scratch)

    def _logits(self, builder: Builder, x: Value) -> Value:
        """Record the head's product and the cap on its result."""
        tape, spec = builder.tape, self.spec
        weight, *biases = self._head_weights()
        with tape.holding(x):
            x = builder.lowered(x)
            logits = tape.value(x.quantity, spec.vocab_size, self.setup.compute_bytes, part=Part.LOGITS)
            copy = builder.cast_weight(weight)
            saves = [x] if weight.trainable else []
            if copy is not None and x.needs_gradient:
                saves.append(copy)
            bias = biases if not weight.coded else []
            scratch = [(ONE, builder.cast_bias(b, spec.vocab_size)) for b in bias]
            packs = not weight.coded or weight.trainable
            tape.apply(
                "head",
                [(x, NEW)],
                logits,
                saves,
                [weight, *bias],
                scratch=scratch,
                custom=weight.coded,
                packs=packs,
                reduces=builder.summed(x, bias[0] if bias else None),
            )
            if weight.coded and biases:
                ways = [(logits, SAME)]
                total = builder.fresh(logits)
                reduces = builder.summed(x, biases[0])
                logits = tape.apply("add bias", ways, total, weights=biases, packs=False, reduces=reduces)
            tape.touch(*([copy] if copy is not None else []))
        tape.instant = "loss backward"
        return self._capped(builder, logits) if spec.final_logit_softcap else logits

    def _capped(self, builder: Builder, logits: Value) -> Value:
        """Record the scaled tanh that some models bound their logits with."""
        with builder.tape.holding(logits):
            scaled = builder.pointwise("scale", logits)
            bounded = builder.fresh(scaled)
            builder.tape.apply("tanh", [(scaled, NEW)], bounded, [bounded])
            return builder.pointwise("scale", bounded)

    def _head_weights(self) -> list[Weight]:
        """Return the head's weight, and its bias where it has one."""
        names = self.spec.names
        name = names.embedding if self.spec.tie_word_embeddings else names.head
        weight = self._head_weight(self.weights[f"{name}.weight"])
        return [weight, *([self.weights[f"{names.head}.bias"]] if self.spec.head_bias else [])]

    def _head_weight(self, weight: Weight) -> Weight:
        """Return the head's weight; a tied one's gradient waits, in the weight's dtype, for the embedding's."""
        if not self.spec.tie_word_embeddings or weight.coded or not weight.trainable:
            return weight
        cast = weight.copy_kept and weight.copy_bytes > 0
        formed = weight.copy_bytes if cast else weight.formed_bytes
        return replace(
            weight, delayed=True, converted=cast, formed_bytes=formed, gradient_bytes=weight.formed_bytes, add_bytes=0
        )

    def _delayed_bytes(self) -> int:
        """Return the gradient of a tied head, which stands by until that of the embedding is there."""
        weight = self._head_weight(self.weights[f"{self.spec.names.embedding}.weight"])
        return weight.gradient_bytes if weight.delayed else 0

    def _loss_bytes(self) -> int:
        """Return the bytes of the loss; its gradient, which backward starts from, has as many.

        Both live until backward ends; accumulation divides the loss, which makes another.
        """
        return 4 if self.setup.autocast or self.setup.profile.loss != "bf16" else self.setup.compute_bytes

    def _root_bytes(self) -> int:
        """Return the loss and the gradients that backward starts from; scaling forms an fp32 loss besides."""
        config = self.setup.config
        if config.loss_scaling:
            return self._loss_bytes() + 8 + (4 if config.gradient_accumulation_steps > 1 else 0)
        return self._loss_bytes() * (3 if config.gradient_accumulation_steps > 1 else 2)

    def _tied_sum(self, around: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the moments at which the gradients of a tied embedding and head are added up and used.

        The head's stands by until the embedding's is there, and their sum is a third tensor, unless
        the head's has been formed by a cast or a sum and nobody else holds it. The sum is then
        stored like any gradient.
        """
        weight = self.weights[f"{self.spec.names.embedding}.weight"]
        if not self.spec.tie_word_embeddings or not weight.trainable or weight.coded:
            return
        profile = self.setup.profile
        positions = self.weights.get(f"{self.spec.names.positions}.weight")
        others = positions.gradient_bytes if positions and positions.own_mode(mode) == "first" else 0
        if not self._head_weight(weight).converted and not (profile.loss == "chunked" and not self.regime.one_chunk):
            form = add_forms(around, self._constant(Part.GRADIENTS, 2 * weight.formed_bytes + others))
            yield Instant("end of backward", "sum of the tied gradients", form)
        if extra := weight.storing_bytes(mode):
            form = add_forms(around, self._constant(Part.GRADIENTS, extra + others))
            yield Instant("end of backward", f"{weight.name} gradient", form)

    def _head_left(self, mode: Mode) -> int:
        """Return the gradients that head and final norm leave."""
        left = self.head.left(mode)
        if self.setup.profile.loss == "chunked":
            weights = (w for w in self._head_weights() if w.trainable)
            left += sum(w.gradient_bytes for w in weights if w.own_mode(mode) == "first")
        return left

    @cached_property
    def _chunk(self) -> Section:
        """Return head and loss of one chunk of tokens."""
        builder = self._builder()
        builder.tape.instant = "head backward"
        normed = self.head.output
        x = builder.tape.part_of(Quantity.CHUNK, self.spec.hidden_size, normed.element_bytes, normed.needs_gradient)
        loss = self._loss(builder, x, wide=True)
        for node in builder.tape.nodes:
            # Chunks add up their gradients as they are formed; the sum is cast and stored once, at the end.
            node.weights = tuple(
                w if w.coded else replace(w, own_bytes=0, converted=False, delayed=False, summed=True)
                for w in node.weights
            )
        return Section(builder.tape, x, loss)

    def _head_forward(self, played: Played, around: Form) -> Iterator[Instant]:
        """Yield the moments of forward from the final norm on; ``around`` is what the layers have left."""
        for moment in played.forward:
            yield moment.around(around, "forward")
        if self.setup.profile.loss != "chunked":
            return
        chunk = self._chunk
        named = {value.storage: value for value in (self.head.entry, self.normed)}
        saved = {storage for node in self.head.tape.nodes for storage in node.saved}
        rows = [
            single_form(Part.ACTIVATIONS, value.quantity, value.coefficient)
            for storage, value in named.items()
            if storage not in saved
        ]
        losses = self._constant(Part.LOGITS, 4 * (self.setup.profile.loss_chunks - 1))
        around = add_forms(around, played.kept, played.carried, *rows, losses)
        for moment in chunk.played("first", "full").forward:
            yield moment.around(around, "forward", f"{moment.operation} of a chunk")

    def _head_instants(self, played: Played, around: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the moments of backward from the loss to the last layer's result."""
        if self.setup.profile.loss == "chunked":
            yield from self._chunked_instants(played, around, mode)
            return
        for instant in played.backward:
            yield instant.around(around, instant.name or "loss backward")

    def _chunked_instants(self, played: Played, around: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the instants of a loss over chunks, each of which runs again in backward."""
        chunk = self._chunk
        norm = played.kept
        rows = single_form(Part.ACTIVATIONS, self.head.output.quantity, self.head.output.coefficient)
        trained = [w for node in chunk.tape.nodes for w in node.weights if w.trainable]
        plain = sum(w.formed_bytes for w in trained if not w.coded)
        # Gradients of codes are added in their store, which a second micro-step finds filled.
        stored = sum(w.gradient_bytes for w in trained if w.coded and w.own_mode(mode) == "first")
        summed = self._constant(Part.GRADIENTS, plain + stored)
        parts = single_form(Part.TEMPORARIES, self.head.output.quantity, self.head.output.coefficient)
        rows_of_chunk = single_form(Part.TEMPORARIES, Quantity.CHUNK, chunk.entry.coefficient)
        several = not self.regime.one_chunk
        # The gradient of the last chunk's rows is formed in its own backward, which has used up the gradient of the
        # sum of losses, one fp32 number.
        others = add_forms(summed if several else ZERO, parts, scale_form(rows_of_chunk, -1))
        inside: Mode = "again" if several and mode != "layer" else mode
        head = self._head_weights()[0]
        for instant in chunk.played(inside, "full").backward:
            name, operation = instant.name or "loss backward", f"{instant.operation} of a chunk"
            if head.coded and not head.trainable and name == "head backward":
                # Its product keeps nothing, so that the last chunk has let the rows go before.
                yield instant.around(add_forms(around, norm, others), name, operation)
                others_but_one = add_forms(others, scale_form(rows_of_chunk, -1)) if several else others
                yield instant.around(add_forms(around, norm, rows, others_but_one), name, operation)
            else:
                yield instant.around(add_forms(around, norm, rows, others), name, operation)
        around = add_forms(around, self._constant(Part.TEMPORARIES, 4))
        if several and plain:  # those of codes are part of the chunk's own instants
            sums = self._constant(Part.GRADIENTS, 2 * plain)
            first = ZERO if self.setup.profile.loss_chunks == 2 else rows  # both chunks are done, and the rows are gone
            form = add_forms(around, norm, first, summed, sums, scale_form(rows_of_chunk, 2))
            yield Instant("head backward", "sum of two chunks' head gradients", form)
        heads = [weight for weight in self._head_weights() if weight.trainable and not weight.coded]
        if size := sum(weight.storing_bytes("first" if weight.delayed else mode) for weight in heads):
            form = add_forms(around, norm, parts, summed, self._constant(Part.GRADIENTS, size))
            yield Instant("head backward", "gradient of the head", form)
        left = self._head_left(mode) - self.head.left(mode)
        kept = self._constant(Part.GRADIENTS, left or self._delayed_bytes())
        for instant in played.backward:
            # The gradients of the chunks' rows are joined into one, and let go.
            joined = parts if instant.operation == "start" else ZERO
            yield instant.around(add_forms(around, kept, joined), "head backward")
