"""A whole model of GPT-2's shapes as torch compiles it: what the partitioner saves, and the instants of both programs.

Forward and backward are one program each. The partitioner saves what products read, both of a layer's results of norms and
its attention, and no residual stream; backward returns all gradients at its end, so that none is added to an earlier one
before all are there. The sizes below are read from Inductor's programs for nanoGPT's model
(``memplan trace MODEL --stack nanogpt --set compile=model``, torch 2.13.0), and the order of their buffers with them.

Source:
    torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition`` with Inductor's defaults; zeros in the place of
    the gradient of returned logits: torch/_functorch/_aot_autograd/runtime_wrappers.py (v2.13.0).
"""

from collections.abc import Iterator
from functools import cached_property

from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.step.alive_around_layers import logits_of_loop
from memplan.step.compiled.compiled_nanochat import CompiledNanochat, is_nanochat, refuse_other_jobs
from memplan.step.compiled_layers.compiled_layer import refuse_compiled_layers
from memplan.step.instants import StepForms, step_instants
from memplan.step.layers.attention_kernels import RANDOM_STATE_BYTES
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import EVALUATION
from memplan.step.playing.section import SavedTensor
from memplan.step.step_inputs import StepInputs, buffers
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode
from memplan.step.units.collated_rows import evaluated_rows
from memplan.training.resolved import TrainingSetup
from memplan.units import round_up

KERNELS = ("flash", "cudnn", "efficient")
READ = ("norm", "activation", "loss")
"""Kernels besides that the compiler's programs were read of as the stack has them."""

ALIGNED = 8
"""Elements of 16 bits that a product's rows are a multiple of, or the compiler pads them where that is faster
(``get_alignment_size`` in torch/_inductor/fx_passes/pad_mm.py)."""

BACKWARD = "loss backward"
"""Instant of all of backward, which is one program."""

STATISTIC = 4
"""An fp32 number for each row: of a norm, of attention, of a softmax."""


def is_gpt2_shaped(spec: ModelSpec) -> bool:
    """Tell whether a model is built of what nanoGPT builds: learned positions, one fused projection, a tied head."""
    if len(spec.runs) != 1 or spec.learned_positions == 0 or not spec.tie_word_embeddings or spec.head_bias:
        return False
    heads, mlp = spec.runs[0].layer.attention, spec.runs[0].layer.feed_forward
    if not isinstance(heads, Attention) or not isinstance(mlp, Mlp) or mlp.gated or heads.rotary_dim:
        return False
    whole = heads.num_heads == heads.num_key_value_heads and heads.query_size == spec.hidden_size
    return heads.fused_qkv and whole and heads.query_key_norm is None and spec.final_norm.kind == "layer"


def refuse_compiled(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for a compiled job that was not read from the compiler's programs.

    Raises:
        CannotAnswerError: Another stack, family, dtype, kernel or layout.
    """
    compiled = setup.config.compile
    if is_nanochat(spec):
        refuse_other_jobs(setup)
        return
    if compiled == "none":
        return
    if compiled == "layers":
        refuse_compiled_layers(spec, setup)
        return
    known = setup.stack.name == "nanogpt" and is_gpt2_shaped(spec)
    if not known:
        raise CannotAnswerError(
            f"compile: {compiled} is not modelled for {spec.architecture} under stack {setup.stack.name}; what is: model, for "
            "GPT-2's shapes under nanogpt; with compile: none the answer is that of the same step without a compiler"
        )
    config = setup.config
    plain = setup.autocast and setup.compute_bytes == 2 and config.adapter is None and config.parallel.data == 1
    plain = plain and {*setup.format_names.values(), config.gradients.dtype or "fp32"} == {"fp32"}
    if not plain or setup.checkpointing != "none" or config.gradients.lifetime != "step":
        raise CannotAnswerError(
            "compile: model is modelled for fp32 weights and gradients under autocast to 16 bits on one GPU, without adapters and checkpointing"
        )
    if setup.profile.attention not in (*KERNELS, "auto"):
        raise CannotAnswerError(f"kernels.attention: {setup.profile.attention} is not modelled with compile: model")
    for key in READ:
        given, own = getattr(setup.profile, key), getattr(setup.stack.kernels, key)
        if given != own:
            raise CannotAnswerError(f"kernels.{key}: {given} is not modelled with compile: model; use {own}")


class CompiledModel:
    """What a compiled model of GPT-2's shapes has alive.

    Args:
        taped: The same model on tape, whose weights it has.
    """

    def __init__(self, inputs: StepInputs, taped: ModelOnTape) -> None:
        spec, self.inputs = inputs.spec, inputs
        layer = spec.runs[0].layer
        assert isinstance(layer.attention, Attention)
        assert isinstance(layer.feed_forward, Mlp)
        self.width, self.inner, self.vocab = spec.hidden_size, layer.feed_forward.intermediate_size, spec.vocab_size
        self.heads, self.layers = layer.attention, spec.num_hidden_layers
        self.drops = taped.settings.block.dropout > 0
        self.kernel = inputs.setup.profile.attention
        matrices = self.width * (4 * self.width + 2 * self.inner)
        self.copies = 2 * matrices
        gradients = inputs.gradient_bytes - 4 * self.width * (self.vocab + spec.learned_positions)
        self.layer_gradients = gradients // self.layers

    # ---------------------------------------------------------------- sizes
    def rows(self, size: int, part: Part = Part.ACTIVATIONS) -> Form:
        """Return so many bytes for each token."""
        return single_form(part, Quantity.TOKENS, size)

    @cached_property
    def logits(self) -> Form:
        """Logits in 16 bits: of the model, of zeros in the place of their gradient, or of the loss's gradient."""
        return self.rows(2 * self.vocab, Part.LOGITS)

    @cached_property
    def head_copy(self) -> Form:
        """The tied embedding in 16 bits, which the head multiplies by; its gradient has as many bytes."""
        return constant_form(Part.TEMPORARIES, 2 * self.vocab * self.width)

    @cached_property
    def layer_saved(self) -> tuple[SavedTensor, ...]:
        """What one layer saves, tensor by tensor: results of norms before and after scale and cast, and what products read."""
        width, inner, tokens = self.width, self.inner, Quantity.TOKENS
        aligned = Quantity.ALIGNED_TOKENS if self.kernel == "efficient" else tokens
        random = RANDOM_STATE_BYTES.get(self.kernel, 0)
        tensors = [
            ("normalised input", tokens, 4 * width),
            ("input norm", tokens, 2 * width),
            ("query, key and value", tokens, 6 * width),
            ("attention", tokens, 2 * width),
            ("attention statistics", aligned, STATISTIC * self.heads.num_heads),
            ("attention random state", Quantity.ONE, random),
            ("normalised attention", tokens, 4 * width),
            ("attention norm", tokens, 2 * width),
            ("up projection", tokens, 2 * inner),
            ("activation", tokens, 2 * inner),
            ("statistics of norms", tokens, 2 * STATISTIC),
            ("weights in 16 bits", Quantity.ONE, self.copies),
            *([("dropout masks", tokens, 2 * width)] if self.drops else []),
        ]
        return tuple((name, quantity, size, Part.ACTIVATIONS) for name, quantity, size in tensors if size)

    @cached_property
    def layer(self) -> Form:
        """What one layer saves."""
        forms = (single_form(part, quantity, size) for _, quantity, size, part in self.layer_saved)
        return sum(forms, ZERO)

    @cached_property
    def embedded(self) -> Form:
        """What embeddings save besides the first layer's input: positions, their rows, and a mask."""
        positions = single_form(Part.ACTIVATIONS, Quantity.POSITIONS, 8 + (0 if self.drops else 4 * self.width))
        return positions + (self.rows(self.width) if self.drops else ZERO)

    @cached_property
    def saved(self) -> Form:
        """What forward leaves for backward, logits aside: final norm and softmax included."""
        last = self.rows(6 * self.width + 3 * STATISTIC)
        return self.embedded + self.layer * self.layers + last + self.head_copy

    # ---------------------------------------------------------------- instants
    def one_pass(self, base: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the instants of one forward and backward; logits that the loop holds are there besides.

        Args:
            base: What is there throughout.
            mode: Unused: gradients are there together, whatever becomes of them.
        """
        del mode
        # results not yet summed, three at most
        waiting = self.rows((2 if self.drops else 6) * self.width, Part.TEMPORARIES)
        yield Instant("forward", "final norm", base + self.saved - self.head_copy + waiting)
        yield Instant("forward", "logits", base + self.saved + self.logits)
        yield Instant(BACKWARD, "gradient of logits", base + self.saved + self.logits * 2)
        yield Instant(BACKWARD, "gradient of the head", base + self.saved + self.logits + self.head_copy)
        base += self.head_copy  # the gradient of the tied head, in 16 bits until that of the embedding is added
        yield from self._layers(base)
        table = 4 * self.vocab * self.width
        formed = self.inputs.gradient_bytes - table
        form = base + constant_form(Part.GRADIENTS, formed + 2 * table)
        yield Instant(BACKWARD, "sum of the tied gradients", form)

    def _layers(self, base: Form) -> Iterator[Instant]:
        """Yield the fullest moments of the last and the first layer's backward; in between, bytes change evenly."""
        width, inner = self.width, self.inner
        for number in dict.fromkeys((self.layers, 1)):
            above = constant_form(Part.GRADIENTS, self.layer_gradients * (self.layers - number))
            name, around = f"layer {number}", base + above + self.embedded
            later = self.rows(2 * inner + 4 * width, Part.TEMPORARIES) if number < self.layers else ZERO
            stream = self.rows(12 * width, Part.TEMPORARIES)
            yield Instant(
                BACKWARD, f"{name}: gradient of the residual stream", around + self.layer * number + stream + later
            )
            yield Instant(BACKWARD, f"{name}: attention", around + self.layer * (number - 1) + self._attention())

    def _attention(self) -> Form:
        """Return a layer's own bytes while the kernel of attention's backward runs.

        What it has saved of norm, query, key, value and attention, with one copy of weights; the gradient of the stream, that of
        the up projection, whose buffer is used again below, and those of attention, query, key and value; and gradients.
        """
        width, inner = self.width, self.inner
        saved = self.rows(14 * width + STATISTIC * self.heads.num_heads)
        gradients = self.rows(12 * width + 2 * inner, Part.TEMPORARIES)
        weights = width * (width + 2 * inner)
        formed = constant_form(Part.GRADIENTS, 4 * weights)
        copies = constant_form(Part.TEMPORARIES, 2 * (3 * width * width + width * width + width * inner))
        return saved + gradients + formed + copies + self._workspace()

    def _workspace(self) -> Form:
        """Return what the kernel of flash attention's backward allocates inside itself: sums, and a gradient in fp32."""
        if self.kernel != "flash":
            return ZERO
        width = round_up(self.heads.head_dim, 32 if self.heads.head_dim <= 128 else 64)
        size = 4 * self.heads.num_heads * (1 + width)
        return single_form(Part.TEMPORARIES, Quantity.PADDED_TOKENS, size)

    def evaluation(self, resident: Form) -> Iterator[Instant]:
        """Yield the fullest moments of a forward without gradients: a feed-forward part, and logits beside those held before.

        Args:
            resident: Logits that the loop of evaluation still has a name for.
        """
        resident += evaluated_rows(self.inputs.setup)
        wide = self.rows(6 * self.width + 4 * self.inner) + constant_form(Part.TEMPORARIES, 2 * self.width * self.inner)
        yield Instant(EVALUATION, "feed-forward part", resident + wide)
        yield Instant(EVALUATION, "logits", resident + self.logits + self.head_copy + self.rows(6 * self.width))


def compile_compiled_step(inputs: StepInputs, taped: ModelOnTape) -> StepForms:
    """Return the closed forms of a training step whose model torch compiles."""
    if is_nanochat(inputs.spec):
        own = CompiledNanochat(inputs)
        steps = tuple(step_instants(inputs, taped, own.one_pass))
        return StepForms(
            steps, buffers(inputs), ((f"{own.layers} x layer 1", own.layer_saved),), inputs.optimizer.formula
        )
    model, resident = CompiledModel(inputs, taped), logits_of_loop(inputs.setup, taped)
    candidates = [i for i in step_instants(inputs, taped, model.one_pass) if i.name != EVALUATION]
    candidates += model.evaluation(resident) if inputs.setup.config.evaluation else ()
    around = tuple(i.around(resident) for i in candidates)
    saved = ((f"{model.layers} x layer 1", model.layer_saved),)
    return StepForms(around, buffers(inputs), saved, inputs.optimizer.formula)


def padded_bytes(spec: ModelSpec, tokens: int) -> int:
    """Return what the compiler may take besides: a padded copy of logits, where it finds rows of another width faster.

    It times both on the card, which nothing here can; the upper end of an answer has the copy.

    Args:
        tokens: Tokens of a micro-batch.
    """
    if spec.vocab_size % ALIGNED == 0:
        return 0
    return 2 * tokens * (spec.vocab_size + ALIGNED - spec.vocab_size % ALIGNED)
