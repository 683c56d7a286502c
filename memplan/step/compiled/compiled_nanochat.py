"""nanochat's model as torch compiles it: what the partitioner saves of it, and the fullest moments of both programs.

The sizes are read from Inductor's programs for nanochat's own code (``memplan trace MODEL --stack nanochat``, torch 2.13.0).
Nothing of a norm is saved but a number for each row and its result, which products read; a squared ReLU is saved behind and in front;
residual streams stay between parts, for norms; logits of 16 bits, which the loss's gradient takes the place of by way of fp32.

Source:
    ``GPT.forward`` in nanochat/gpt.py (92d63d4e); torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition`` (v2.13.0).
"""

from collections.abc import Iterator
from functools import cached_property

from memplan.catalog.update_classes import STACKED
from memplan.errors import CannotAnswerError
from memplan.model.families.nanochat_gpt import ARCHITECTURE, SMEAR_CHANNELS, has_values
from memplan.model.spec import Attention, ModelSpec
from memplan.step.playing.section import SavedTensor
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode
from memplan.training.resolved import TrainingSetup

BACKWARD = "loss backward"
STATISTIC = 4
"""An fp32 number for each row: of a norm, of attention, of a softmax."""


def is_nanochat(spec: ModelSpec) -> bool:
    """Tell whether a model is nanochat's own."""
    return spec.architecture == ARCHITECTURE


def refuse_other_jobs(setup: TrainingSetup) -> None:
    """Raise for a job of nanochat's that its scripts do not run, or that was not read.

    Raises:
        CannotAnswerError: With what to set instead.
    """
    config, parallel = setup.config, setup.config.parallel
    if ARCHITECTURE not in setup.stack.models.families:
        raise CannotAnswerError(f"nanochat's own model is not modelled under {setup.stack.label}; use --stack nanochat")
    narrow = {**dict.fromkeys(setup.format_names, "fp32"), "embedding": "bf16"}
    if config.compile != "model":
        raise CannotAnswerError(
            f"compile: {config.compile} is not modelled for nanochat, whose scripts compile the model; use compile: model"
        )
    if dict(setup.format_names) != narrow or not setup.autocast or config.compute_dtype != "bf16":
        raise CannotAnswerError(
            "nanochat is modelled with weights in fp32, embeddings in bf16 and products in bf16 (NANOCHAT_DTYPE not set)"
        )
    if any(entry.implementation != STACKED for entry in setup.optimizers.values()):
        raise CannotAnswerError(
            "optimizer: nanochat steps by its own; use {hidden_matrix: nanochat-muon, default: nanochat-adamw}"
        )
    others = (
        config.adapter is not None
        or setup.checkpointing != "none"
        or config.gradients.lifetime != "step"
        or config.clip_gradients
    )
    if others or config.evaluation:
        raise CannotAnswerError(
            "adapters, checkpointing, clipping, gradients layer by layer and evaluation are not modelled for nanochat"
        )
    if parallel.data > 1 and parallel.zero_stage != 1:
        raise CannotAnswerError("parallel.zero_stage: nanochat's optimizer shares out states among GPUs; use 1")
    if setup.profile.attention not in ("flash", "auto"):
        raise CannotAnswerError(
            f"kernels.attention: {setup.profile.attention} is not modelled for nanochat, whose products are in fp32 on cards without bf16; use flash"
        )


class CompiledNanochat:
    """What nanochat's compiled model has alive."""

    def __init__(self, inputs: StepInputs) -> None:
        spec, self.inputs = inputs.spec, inputs
        part = spec.runs[0].layer.attention
        assert isinstance(part, Attention)
        self.width, self.words, self.heads, self.layers = (
            spec.hidden_size,
            spec.vocab_size,
            part.num_heads,
            spec.num_hidden_layers,
        )
        self.valued = sum(has_values(layer, self.layers) for layer in range(self.layers))
        matrices = [entry for entry in inputs.states.tensors if entry.tensor.role in ("hidden_matrix", "head")]
        self.copies = sum(entry.copy_bytes * entry.tensor.count for entry in matrices)
        self.table = self.words * self.width

    def rows(self, size: int, part: Part = Part.ACTIVATIONS) -> Form:
        """Return so many bytes for each token."""
        return single_form(part, Quantity.TOKENS, size)

    @cached_property
    def layer_saved(self) -> tuple[SavedTensor, ...]:
        """What a layer without an embedding of values saves, tensor by tensor."""
        width, heads, tokens = self.width, self.heads, Quantity.TOKENS
        tensors = (
            ("normalised input", 2 * width),
            ("rotated query and key", 4 * width),
            ("query, key and value", 6 * width),
            ("attention", 2 * width),
            ("attention statistics", STATISTIC * heads),
            ("statistics of query and key", 2 * STATISTIC * heads),
            ("residual stream behind attention", 2 * width),
            ("normalised attention", 2 * width),
            ("up projection", 8 * width),
            ("activation", 8 * width),
            ("residual stream", 2 * width),
            ("statistics of norms", 2 * STATISTIC),
        )
        return tuple((name, tokens, size, Part.ACTIVATIONS) for name, size in tensors)

    @cached_property
    def saved(self) -> Form:
        """What forward leaves for backward, logits aside: copies of all matrices in 16 bits, the head's among them."""
        layer = sum(size for _, _, size, _ in self.layer_saved)
        values = 2 * self.width + 2 * self.heads
        # channels of the token before are a view of one sequence, and a copy of several
        channels = self.width if self.inputs.regime.one_sequence else SMEAR_CHANNELS
        embedded = 4 * self.width + STATISTIC + 2 * channels + 2
        last = 2 * self.width + 3 * STATISTIC
        rows = self.layers * layer + self.valued * values + embedded + last
        return self.rows(rows) + constant_form(Part.TEMPORARIES, self.copies)

    @cached_property
    def logits(self) -> Form:
        """Logits, or their gradient, in 16 bits."""
        return self.rows(2 * self.words, Part.LOGITS)

    def one_pass(self, base: Form, mode: Mode) -> Iterator[Instant]:
        """Yield the fullest moments of one forward and backward.

        Args:
            base: What is there throughout.
            mode: Unused: gradients are there together, whatever becomes of them.
        """
        del mode
        loss = base + self.saved + self.logits
        yield Instant("forward", "logits", loss)
        if cut := self.inputs.spec.cut_words:  # padding the gradient is a kernel of its own
            wide = self.rows(4 * (self.words - cut), Part.LOGITS)
            yield Instant(BACKWARD, "gradient of logits", loss + wide)
        loss -= self.rows(2 * STATISTIC)
        yield Instant(BACKWARD, "gradient of the head", loss + constant_form(Part.GRADIENTS, 2 * self.table))
        head = constant_form(Part.GRADIENTS, 4 * self.table)
        yield Instant(BACKWARD, "gradient of the head in fp32", loss - self.logits + head)
        # embeddings' gradients are summed in fp32, each cast before the next; that of the first is last
        tables = constant_form(Part.GRADIENTS, self.inputs.gradient_bytes)
        yield Instant(
            BACKWARD, "gradients of embeddings", base + tables + constant_form(Part.TEMPORARIES, 4 * self.table)
        )
