"""What a training step is compiled from, and its parameters as tapes see them."""

from memplan.documents.frozen_values import dataclass
from memplan.model.spec import MixtureOfExperts, ModelSpec
from memplan.step.blocks.block_settings import Regime
from memplan.step.blocks.fused_adapters import run_together
from memplan.step.kernels.family_code import family_code, tables_in_layers
from memplan.step.kernels.image_rows import image_batch
from memplan.step.kernels.layer_arguments import graph_has_tables, layer_arguments, rotary_tables, steps_through_scores
from memplan.step.playing.recomputation import Recomputation
from memplan.step.states.model_states import ModelStates
from memplan.step.states.muon_scratch import codec_scratch, decoding_sizes, row_decoding
from memplan.step.states.optimizer_scratch import (
    Temporaries,
    emptied_names,
    handed_over,
    store_bytes,
    stored_names,
    tensor_temporaries,
)
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.taped_operations import Weight
from memplan.step.tensors.tensor_states import TensorStates
from memplan.step.units.collated_rows import collated_bytes, generated_rows, prompt_rows, token_types
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import ceil_div

LOSS_SCALE_BYTES = 8
"""Scale and growth tracker, which stay; unscaling makes an inverse and a flag for overflow besides.

Source: torch/amp/grad_scaler.py (v2.13.0).
"""


BLOCK_MASK_BYTES = 16
"""A block mask of flex attention: numbers of blocks and their places in 32 bits, full and partial ones, by query and by key.

Source: torch/nn/attention/flex_attention.py, ``BlockMask`` (v2.13.0).
"""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All that a training step depends on."""

    spec: ModelSpec
    setup: TrainingSetup  # The training setup; that of gathered weights where ranks hold shards
    states: ModelStates  # States of the tensors that operations read, which are whole
    regime: Regime  # What batch and length decide
    gradient_bytes: int  # Gradients that the rank stores
    optimizer: Temporaries  # Scratch of the rank's optimizer step
    clipping_bytes: int  # Scratch of clipping the rank's gradients

    @property
    def recomputation(self) -> Recomputation:
        """What forward saves of a layer, and how the rest is computed again."""
        rules = self.setup.stack.checkpointing
        alternate = rules.selective == "alternate-products"
        whole = rules.reentrant or not rules.early_stop
        return Recomputation(self.setup.checkpointing, alternate, whole, rules.reentrant)

    def is_last(self, number: int) -> bool:
        """Tell whether a layer, numbered from 0, is the last."""
        return number == self.spec.num_hidden_layers - 1

    @property
    def staged_bytes(self) -> int:
        """Of a token: two buffers by turns for inputs that come back from host memory, where they wait in buffers there.

        Source:
            ``UnslothCheckpointFunction`` in unsloth_zoo/gradient_checkpointing.py (2026.10.9): the second is there while
            more than 512 MiB of the card are free.
        """
        buffered = self.regime.staged and self.setup.stack.checkpointing.offloads == "buffers"
        return 2 * self.spec.hidden_size * self.setup.residual_bytes if buffered else 0

    @property
    def decoder_bytes(self) -> int:
        """The buffer that products of forward decode codes into, which stays: of the largest matrix that one function has with its adapter.

        Source:
            ``_scratch`` and ``fast_dequantize`` in unsloth/kernels/utils.py, ``patch_peft_model`` in models/llama.py
            (2026.10.9).
        """
        if not (self.setup.stack.projections.fused_overwrites and self.setup.profile.fused_adapters):
            return 0
        entries = self.states.tensors
        adapted = {entry.tensor.name.partition(".lora_A.")[0] for entry in entries if ".lora_A." in entry.tensor.name}
        adapted.difference_update(entry.tensor.name.removesuffix(".bias") for entry in entries)
        sizes = [
            entry.copy_bytes
            for entry in entries
            if entry.quantized and adapted.issuperset(run_together(entry.tensor.name.removesuffix(".weight")))
        ]
        return max(sizes, default=0)


Parameter = tuple[str, bool, tuple[int, ...]]
"""A parameter's name, and whether it trains."""


def taped_weights(setup: TrainingSetup, states: ModelStates, idle: str = "") -> dict[Parameter, Weight]:
    """Return every parameter tensor that is used as tapes see it; one that several runs of layers have is alike in all in which it trains.

    Args:
        idle: The module that runs besides, though nothing reads its result; empty for none.
    """
    emptied, stored = emptied_names(setup, states.tensors), stored_names(setup, states.tensors)
    distinct = {
        (entry.tensor.name, entry.trainable, entry.tensor.shape): entry
        for entry in states.tensors
        if entry.tensor.used or (idle and entry.tensor.name.startswith(f"{idle}."))
    }
    return {key: _taped(setup, entry, key[0] in emptied, key[0] in stored) for key, entry in distinct.items()}


def _taped(setup: TrainingSetup, entry: TensorStates, emptied: bool, stored: bool) -> Weight:
    """Return a parameter tensor as tapes see it.

    Args:
        emptied: Whether a step takes its gradient away in any case.
        stored: Whether its gradient stands in a store of the bundled optimizer.
    """
    layer = setup.config.gradients.lifetime == "layer"
    parametrised = entry.quantized and setup.config.parallel.staged_codes
    scales = _scales_bytes(setup, entry)
    return Weight(
        name=entry.tensor.name,
        trainable=entry.trainable,
        element_bytes=entry.element_bytes,
        copy_bytes=entry.copy_bytes,
        copy_saved=not entry.quantized,
        own_bytes=entry.weight_bytes,
        formed_bytes=entry.formed_bytes,
        gradient_bytes=entry.gradient_bytes,
        gradient_scale_bytes=0 if setup.gradient is None else setup.gradient.tensor_bytes,
        coded=entry.quantized and not parametrised,
        parametrised=parametrised,
        add_bytes=store_bytes(setup, entry, stored=stored),
        converted=entry.trainable and _is_converted(setup, entry),
        emptied=emptied,
        handed_over=not entry.quantized and handed_over(setup, entry),
        update_bytes=tensor_temporaries(setup, entry).bytes if layer and entry.trainable else 0,
        rows=entry.tensor.shape[0],
        columns=entry.tensor.shape[-1],
        direct=entry.tensor.transposed,
        foreign=entry.element_bytes == 2 == setup.compute_bytes
        and not entry.quantized
        and entry.format_name != setup.config.compute_dtype,
        decoding_sizes=(scales,) if parametrised else decoding_sizes(entry, setup.compute_bytes),
        scales_bytes=0 if parametrised else scales,
        decoded_bytes=_decoded_bytes(setup, entry),
        row_decoding=row_decoding(entry, setup.compute_bytes),
        decoding_parts=_decoding_parts(setup, entry),
        decoded_alike=entry.quantized and setup.stack.projections.codes_from == "fp16",
        integers=entry.quantized and setup.formats[entry.tensor.role].product == "integers",
    )


def _decoding_parts(setup: TrainingSetup, entry: TensorStates) -> tuple[int, ...]:
    """Return the temporaries of forming a product's copy of codes by operators of torch; negative for those that do not stay."""
    stored, elements = setup.formats[entry.tensor.role], entry.tensor.elements
    if not entry.quantized:
        return ()
    sizes = [(size * elements // stored.block_elements, stays) for size, stays in stored.decoding_temporaries]
    return tuple([size if stays else -size for size, stays in sizes])


def _scales_bytes(setup: TrainingSetup, entry: TensorStates) -> int:
    """Return the fp32 scales that decoding forms first, where they are stored as codes themselves."""
    elements = setup.formats[entry.tensor.role].coded_scale_elements if entry.quantized else 0
    return 4 * ceil_div(entry.tensor.elements, elements) if elements and setup.stack.projections.codes_scales else 0


def _decoded_bytes(setup: TrainingSetup, entry: TensorStates) -> int:
    """Return a weight as backward decodes it: in the dtype that it was loaded in, where products have another."""
    # Source: ``MatMul4Bit.backward`` in bitsandbytes/autograd/_functions.py (0.50.2): ``dequantize_4bit(B,
    # state).to(...)``.
    loaded = "fp16" if setup.stack.projections.codes_from == "fp16" else setup.loaded_float
    if not entry.quantized or setup.stack.projections.codes_result != "input" or loaded == setup.config.compute_dtype:
        return 0
    return entry.tensor.elements * FLOAT_BYTES.get(loaded, setup.compute_bytes)


def _is_converted(setup: TrainingSetup, entry: TensorStates) -> bool:
    """Whether a gradient is stored in another dtype than it is formed in; two of them are equally wide."""
    formed = setup.config.compute_dtype if entry.quantized else entry.format_name
    narrow = entry.gradient_bytes == entry.formed_bytes == 2 * entry.tensor.elements
    return entry.gradient_bytes != entry.formed_bytes or (narrow and entry.gradient_name != formed)


# -------------------------------------------------------------------- what is there throughout


def buffers(inputs: StepInputs) -> Form:
    """Return token ids, targets, positions and rotary tables."""
    spec, setup = inputs.spec, inputs.setup
    code = family_code(setup.stack, spec.architecture)
    positions = 8 if spec.learned_positions and not code.forms_tables and spec.encoder is None else 0
    scale = LOSS_SCALE_BYTES if setup.scales_loss else 0
    micro_steps = setup.config.gradient_accumulation_steps
    together = config.parallel.together if (config := setup.config).parallel.pipeline > 1 else 0
    ranks = setup.config.parallel.context
    batch = ranks * (together * collated_bytes(setup) if together else collated_bytes(setup, micro_steps))
    batch += token_types(spec, setup, micro_steps)
    rows = Quantity.TOKENS if config.method.embedding is None else Quantity.COLUMN_TOKENS
    form = generated_rows(setup) if setup.answer_length else single_form(Part.ACTIVATIONS, rows, batch)
    form += prompt_rows(setup, micro_steps) + constant_form(
        Part.ACTIVATIONS, _expert_offset_bytes(spec, apart=code.experts_apart) + _table_bytes(inputs.states) + scale
    )
    form += constant_form(Part.ACTIVATIONS, _triangle_bytes(spec, setup))
    if steps_through_scores(spec, setup) and not (code.added_mask or code.masks_layers or code.scales_in_place):
        form += single_form(Part.ACTIVATIONS, Quantity.SQUARE, 1)
    if setup.profile.attention == "flex" and ranks == 1:
        form += single_form(Part.ACTIVATIONS, Quantity.BLOCK_PAIRS, BLOCK_MASK_BYTES * max(1, together))
    form += own_rows(setup) + single_form(Part.ACTIVATIONS, Quantity.POSITIONS, positions)
    models = 2 if config.method.reference_model == "resident" else 1
    form += constant_form(Part.ACTIVATIONS, models * module_bytes(spec, setup))
    form += single_form(Part.ACTIVATIONS, Quantity.TOKENS, inputs.staged_bytes)
    form += constant_form(Part.ACTIVATIONS, inputs.decoder_bytes)
    form += image_batch(spec, setup, micro_steps if any(part.kept for part in setup.stack.batch) else 1)
    return (
        form
        if tables_of_graph(inputs) is not ZERO
        else form + rotary_tables(spec, setup, wide=inputs.regime.wide_tables)
    )


def module_bytes(spec: ModelSpec, setup: TrainingSetup) -> int:
    """Return what transformers' modules keep beside parameters."""
    if setup.stack.model_code != "transformers":
        return 0
    part, in_layers = spec.state_space, family_code(setup.stack, spec.architecture).interleaved == "looked-up"
    own = sum(spec.buffers) * (spec.num_hidden_layers if in_layers else 1)
    if part is None or not part.multiplied:
        return own
    return own + spec.num_hidden_layers * part.projected_size * FLOAT_BYTES[setup.loaded_float]


def own_rows(setup: TrainingSetup) -> Form:
    """Return a rank's part of rows that GPUs share, and of their block mask, which are there as long as forward and backward.

    Formula:
        The mask has ``m`` blocks of the rank's tokens and ``c m`` of all: ``8 b m (1 + c) + 16 b c m^2``.

    Source:
        ``prepare_context_parallel_input`` in torchtitan/distributed/context_parallel/api.py (0.3.0).
    """
    ranks = setup.config.parallel.context
    if ranks == 1:
        return ZERO
    size = sum(part.element_bytes for part in setup.stack.batch)
    form = single_form(Part.ACTIVATIONS, Quantity.TOKENS, size)
    form += single_form(Part.ACTIVATIONS, Quantity.BLOCK_PAIRS, BLOCK_MASK_BYTES * ranks)
    return form + single_form(Part.ACTIVATIONS, Quantity.DELTA_CHUNKS, BLOCK_MASK_BYTES // 4 * (1 - ranks))


def rows_to_come(setup: TrainingSetup) -> Form:
    """Return the rows of later micro-steps, among the buffers, that are not there yet in the first.

    Source:
        ``Trainer.train_step`` in torchtitan/trainer.py (0.3.0).
    """
    later = setup.config.gradient_accumulation_steps - 1 if setup.config.parallel.pipeline == 1 else 0
    size = sum(part.element_bytes for part in setup.stack.batch if part.kept and part.in_turn)
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, size * later * setup.config.parallel.context)


def tables_of_graph(inputs: StepInputs, *, behind: bool = False) -> Form:
    """Return rotary tables that each forward forms anew, which go with its graph; those that this has ``behind`` forward."""
    spec, setup = inputs.spec, inputs.setup
    forms = family_code(setup.stack, spec.architecture).forms_tables and not tables_in_layers(spec, setup)
    forms = forms and (graph_has_tables(spec, setup) or not behind)
    return rotary_tables(spec, setup, wide=inputs.regime.wide_tables) if forms else ZERO


def retained_arguments(inputs: StepInputs) -> Form:
    """Return what layers have been called with that checkpointing keeps, to call them again."""
    if inputs.setup.checkpointing == "none":
        return ZERO
    return layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked, retained=True)


def _table_bytes(states: ModelStates) -> int:
    """Return the tables that grid formats are decoded with, once for each format."""
    layouts = {layout.codec: layout for entry in states.tensors if (layout := entry.coded_as) is not None}
    return sum(codec_scratch(layout).table_bytes for layout in layouts.values())


def _triangle_bytes(spec: ModelSpec, setup: TrainingSetup) -> int:
    """Return the masks that layers keep, of one byte for each pair of positions, and the number beside each."""
    # Source: ``GPT2Attention.__init__`` in transformers/models/gpt2/modeling_gpt2.py, lines 162 to 169 (4.48.3).
    if spec.architecture not in setup.stack.models.triangles:
        return 0
    return (spec.max_position_embeddings**2 + 4) * sum(run.count for run in spec.runs)


def _expert_offset_bytes(spec: ModelSpec, *, apart: bool) -> int:
    """Return the offsets that steer the choice of experts, one fp32 number each, which are no parameters; torchtitan counts tokens too."""
    parts = [(run.layer.feed_forward, run.count) for run in spec.runs]
    return sum(
        4 * (2 if apart else p.score_correction) * p.num_experts * count
        for p, count in parts
        if isinstance(p, MixtureOfExperts)
    )
