"""What a model's ends depend on: its embedding; and its final norm, head and loss."""

from collections.abc import Mapping
from dataclasses import replace

from memplan.catalog.config_keys.method_keys import Divergence, Pooling
from memplan.catalog.kernel_profiles import LossKernel
from memplan.catalog.stacks import Metrics, PairKernel
from memplan.catalog.training_config import ALL_TRAIN
from memplan.documents.frozen_values import dataclass
from memplan.model.encoder import Encoder
from memplan.model.spec import ModelSpec, Norm
from memplan.step.blocks.block_settings import BlockSettings
from memplan.step.kernels.image_rows import asks_by_layer, has_images
from memplan.step.kernels.layer_arguments import layer_arguments, position_quantity
from memplan.step.tapes.linear_forms import ZERO, Part, Quantity, single_form
from memplan.step.tapes.taped_operations import Weight
from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class EndSettings:
    """All that a model's ends depend on, their weights aside."""

    block: BlockSettings  # What operations depend on
    vocab_size: int  # Rows of embedding and head
    final_norm: Norm  # Norm before the head
    tied: bool  # Whether embedding and head are one tensor
    embedding_norm: Norm | None  # Norm behind the embedding
    encoder: Encoder | None  # What an encoder has besides
    learned_positions: bool  # Whether positions have an embedding
    embedding_scale: bool  # Whether the embedding is scaled
    head_bias: bool  # Whether the head has a bias
    bounded_logits: bool  # Whether a scaled tanh bounds the logits
    bounded_stretches: bool  # The same of those that come stretch by stretch
    scaled_logits: bool  # Whether they are multiplied by a factor, or divided by one
    loss: LossKernel  # Kernel of the cross-entropy
    # Whether the model has a name for logits until its forward ends, or the loop until the loss is known.
    names_logits: bool
    loss_behind: bool  # Whether the model's forward has ended before the loss is formed of its logits
    narrow_loss: bool  # Whether the model forms its loss of logits that it cuts, in their own dtype
    shifts_labels: bool  # Whether the loss is given a shifted copy of the labels
    pads_labels: bool  # Whether that is of a copy with one more, as ``ForCausalLMLoss`` makes it (transformers 5.24.0)
    cuts_logits: bool  # Whether it is given the logits without each row's last token, and labels without the first
    casts_logits: bool  # Whether the model has a name for logits in fp32 alone
    embedding_dropout: float  # Probability with which the embedding's output is dropped
    input_gradients: bool  # Whether the output of a frozen embedding is made to need a gradient
    table_gradients: bool  # Whether that is the table's own output, to which an adapter adds
    scores: bool = False  # Whether the head yields scores for each token, of which the loss takes those of the last one
    answers: bool = False  # Whether only the tokens that were generated have labels
    metrics: Metrics = "none"  # What a loss's metrics copy of whole logits
    pairs: PairKernel | None = None  # How a loss over pairs looks at whole logits, where it has no reference model
    compiled_loss: bool = False  # Whether torch compiles the loss by itself
    # What distillation compares whole logits with a teacher's by, and what that returns besides (``BesideModel.cached``).
    divergence: Divergence | None = None
    cached: tuple[tuple[int, int], ...] = ()
    compared: tuple[int, int] = (0, 0)  # Width of a teacher's hidden states, and bytes of an element of them
    chosen_nll: bool = False  # Whether the likelihood of chosen answers is a second loss
    # Whether a head of values beside the model's own alone is learnt from; and whether the other asks for gradients yet.
    value_head: bool = False
    own_head_trains: bool = False
    pooling: Pooling | None = None  # What becomes of a row's tokens in place of logits, where a model has no head
    layer_input: int = 0  # Width of what each layer is given of embeddings of its own
    # What layers were called with and nothing keeps, which the model has names for until the final norm is done.
    arguments: tuple[tuple[Quantity, int], ...] = ()

    @property
    def backward_at_once(self) -> bool:
        """Whether the head's gradient is there before any other, chunk by chunk."""
        return self.loss == "chunked-backward"

    @property
    def yields_rows(self) -> bool:
        """Whether a row has one result, an embedding or its scores, in the place of logits for each token."""
        return self.pooling is not None or self.encoder is not None

    @property
    def ties_gradients(self) -> bool:
        """Whether gradients of a tied embedding and head are added up when both are there."""
        return self.tied and not self.backward_at_once and not self.value_head

    @property
    def loss_bytes(self) -> int:
        """The loss; its gradient, which backward starts from, has as many.

        Both live until backward ends; accumulation divides the loss, which makes another.
        """
        return 4 if self.block.autocast or self.loss != "bf16" else self.block.compute_bytes


def end_settings(spec: ModelSpec, block: BlockSettings, setup: TrainingSetup, *, frozen: bool) -> EndSettings:
    """Return what a model's ends depend on; equal ones give equal tapes.

    Args:
        frozen: Whether its embedding is.
    """
    # Source: ``GPTNeoXForCausalLM.forward`` in transformers/models/gpt_neox/modeling_gpt_neox.py, lines 1200 to 1213 (4.46.3).
    narrow = spec.architecture in setup.stack.models.narrow_losses and not setup.scores
    given, dropped = setup.config.dropout is not None, block.code.drops_embedding
    drops = dropped == "released" or (given and dropped == "given")
    return EndSettings(
        block=block,
        vocab_size=setup.score_count or spec.vocab_size,
        final_norm=spec.final_norm,
        tied=spec.tie_word_embeddings and setup.config.method.embedding is None,
        embedding_norm=spec.embedding_norm,
        encoder=spec.encoder,
        learned_positions=spec.learned_positions > 0,
        embedding_scale=bool(spec.embedding_scale),
        head_bias=spec.head_bias,
        bounded_logits=bool(spec.final_logit_softcap) and not block.code.caps_hidden,
        bounded_stretches=bool(spec.final_logit_softcap) and not setup.stack.models.uncapped_stretches,
        scaled_logits=bool(spec.logit_scale),
        loss="bf16" if (setup.scores and setup.profile.loss != "values") or narrow else setup.profile.loss,
        narrow_loss=narrow,
        names_logits=setup.stack.loop.loss in ("model", "named"),
        loss_behind=setup.stack.loop.loss == "named",
        shifts_labels=setup.stack.loop.labels in ("shifted", "cut"),
        pads_labels=(setup.stack.loop.labels, setup.stack.loop.loss) == ("shifted", "model"),
        cuts_logits=setup.stack.loop.labels == "cut" or narrow,
        casts_logits=(_names_wide_logits(spec, setup) or block.code.wide_logits) and not setup.scores and not narrow,
        embedding_dropout=block.dropout if drops else 0.0,
        input_gradients=embeds_with_gradient(setup) and not (asks_by_layer(setup) and has_images(spec, setup)),
        table_gradients=setup.stack.input_gradients in ("checkpointed", "always"),
        scores=setup.scores,
        answers=setup.answer_length > 0,
        metrics=setup.stack.loop.metrics,
        pairs=setup.stack.loop.pairs if setup.compares_pairs else None,
        divergence=setup.config.method.divergence,
        cached=() if setup.teacher is None else setup.teacher.cached,
        compared=_compared(setup),
        chosen_nll=bool(setup.config.method.chosen_nll),
        value_head=setup.has_value_head,
        own_head_trains=setup.has_value_head and setup.config.adapter is None,
        compiled_loss=setup.config.compile == "layers" and setup.stack.loop.compiled,
        pooling=None if setup.config.method.embedding is None else setup.config.method.embedding.pooling,
        layer_input=spec.layer_input,
        arguments=_arguments(spec, block, setup, frozen=frozen),
    )


def _compared(setup: TrainingSetup) -> tuple[int, int]:
    """Return the width of a teacher's hidden states, and the bytes of an element of them."""
    second = setup.teacher
    return (0, 0) if second is None else (second.model.spec.hidden_size, second.setup.residual_bytes)


def _arguments(
    spec: ModelSpec, block: BlockSettings, setup: TrainingSetup, *, frozen: bool
) -> tuple[tuple[Quantity, int], ...]:
    """Return what layers were called with and checkpointing does not keep: bytes for each unit of some quantities."""
    masked = block.regime.masked
    form = layer_arguments(spec, setup, masked=masked)
    if setup.checkpointing != "none":
        form -= layer_arguments(spec, setup, masked=masked, retained=True)
    if spec.learned_positions and block.code.forms_tables:  # names of embeddings whose sum the layers are given
        row = spec.hidden_size * setup.residual_bytes
        leaf = embeds_with_gradient(setup) and frozen
        form += single_form(Part.ACTIVATIONS, position_quantity(block.code), row)
        form += ZERO if leaf else single_form(Part.ACTIVATIONS, Quantity.TOKENS, row)
    return tuple([(Quantity(place), size) for place, size in enumerate(form.totals()) if size])


def _names_wide_logits(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Whether a model has a name for its logits in fp32 alone."""
    # Source: ``MistralForCausalLM.forward`` in transformers/models/mistral/modeling_mistral.py (4.46.3).
    stack = setup.stack
    return stack.loop.logits == "fp32" or spec.architecture in stack.models.wide_logits


def embeds_with_gradient(setup: TrainingSetup) -> bool:
    """Tell whether the output of a frozen embedding is made to need a gradient."""
    if setup.config.freeze.input_gradients is not None:
        return setup.config.freeze.input_gradients
    rule = setup.stack.input_gradients
    checkpoints = rule in ("checkpointed", "checkpointed-adapted") or (
        rule == "trained-layers" and setup.config.freeze == ALL_TRAIN
    )
    if rule in ("reentrant", "prepared-reentrant"):
        checkpoints = setup.stack.checkpointing.reentrant or (rule != "reentrant" and not setup.kbit_floats)
    return rule == "always" or (checkpoints and setup.asks_for_checkpointing)


def head_weights(settings: EndSettings, weights: Mapping[str, Weight]) -> tuple[Weight, ...]:
    """Return the head's weight, and its bias where it has one."""
    names = settings.block.names
    biases = (weights[f"{names.head}.bias"],) if settings.head_bias else ()
    if settings.tied and not settings.backward_at_once:
        return (_tied_weight(weights[f"{names.embedding}.weight"]), *biases)
    if settings.tied:
        return (weights[f"{names.embedding}.weight"], *biases)
    return (weights[f"{names.head}.weight"], *biases)


def _tied_weight(weight: Weight) -> Weight:
    """Return the weight of a tied head; its gradient waits, in the weight's dtype, for the embedding's."""
    if weight.coded or not weight.trainable:
        return weight
    cast = weight.copy_saved and weight.copy_bytes > 0
    formed = weight.copy_bytes if cast else weight.formed_bytes
    return replace(
        weight,
        delayed=True,
        joins_as_stored=weight.stays("first"),
        converted=cast,
        formed_bytes=formed,
        gradient_bytes=weight.formed_bytes,
        gradient_scale_bytes=0,
        add_bytes=0,
    )
