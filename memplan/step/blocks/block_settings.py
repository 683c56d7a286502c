"""What operations on a tape depend on besides their weights."""

from dataclasses import replace

from memplan.catalog.kernel_profiles import AttentionKernel, KernelProfile
from memplan.catalog.stacks import Cache, StackProjections
from memplan.documents.frozen_values import dataclass
from memplan.model.families.family_fields import FamilyCode
from memplan.model.spec import ModelSpec, TensorNames
from memplan.step.kernels.family_code import dropouts, family_code, tables_in_layers
from memplan.step.kernels.layer_arguments import casts_tables_again, copies_tables, steps_through_scores
from memplan.step.states.parallel_shards import casts_shards, is_partitioned
from memplan.step.tapes.kernel_order import Schedule
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.reduction_workspaces import Sums
from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class Regime:
    """What of batch and length decides which operations run at all; sizes within a regime are closed forms."""

    one_sequence: bool = False  # The micro-batch is one sequence: heads that lie apart are then read as they are
    # The micro-batch is one pair of a chosen and a rejected answer, which a loss over pairs cuts in two.
    one_pair: bool = False
    one_token: bool = False  # Sequences of one token: exchanging dimensions moves nothing
    one_chunk: bool = False  # A loss over chunks has one
    stretches: int = 1  # Stretches of a sequence whose logits are formed one after another, or pieces of all rows
    # The last of several has no token that another follows, so that backward never comes to its graph.
    empty_stretch: bool = False
    several_tiles: bool = False  # A loss that forms logits tile by tile has more tokens than one takes
    # There are so many positions that the gradient of their learned embedding is formed by sorting.
    sorts_positions: bool = False
    sorts_distances: bool = False  # The same of biases of scores, of which there are as many as pairs of positions
    sorts_types: bool = False  # The same of token types, of which there are as many as tokens
    staged: bool = False  # Inputs of layers are so large that they wait in host memory, where a stack keeps them there
    # Bytes for each token, and for each that another follows, from which hooks copy a tensor there: 1 to 8, and 9 where more
    # are needed; 0 where there are no hooks.
    copied_widths: tuple[int, int] = (0, 0)
    all_words: bool = False  # Pieces of logits are of the whole vocabulary
    padded: bool = False  # Rows are padded to the longest of several
    masked: bool = False  # Scaled-dot-product attention is given a mask, and not only told that it is causal
    pads_mask: bool = False  # Rows of that mask are no multiple of what its kernel reads at once
    wide_tables: bool = False  # Rotary tables are in fp32, whatever the residual stream is in
    # Chunks of a sequence in gated delta networks, one more than are told one by one where there are more.
    delta_chunks: int = 0
    pads_delta: bool = False  # The last of them is not full
    pads_scan: bool = False  # The same of the chunks that state space layers scan
    one_scan: bool = False  # These scan one chunk
    scan_splits: int = 0  # Parts that their kernels split the heads of a group into
    sums: tuple[Sums, ...] = ()  # How a compiled layer sums over tokens
    # How a compiled layer's programs, forward and backward, run, which the compiler chooses for their sizes.
    orders: tuple[Schedule, Schedule] | None = None


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """All of a model, a setup and a regime that operations on a tape depend on, their weights aside."""

    names: TensorNames  # Names of the modules
    hidden_size: int  # Width of the residual stream
    profile: KernelProfile  # Kernels; those of update and loss are left at their defaults
    wide_attention: AttentionKernel | None  # Kernel of heads that flash does not take, where layers have both
    compute_bytes: int  # Bytes of an element in matrix products
    embedded_bytes: int  # Bytes of an element of embedded tokens
    residual_bytes: int  # Bytes of an element of the residual stream
    autocast: bool  # Whether weights are cast for products
    # Whether autocast is on, which forms powers and sums in fp32 and casts what products read (its lists are in
    # aten/src/ATen/autocast_mode.h, v2.13.0): over FSDP1's units too, whose weights are gathered narrow, but not over
    # FSDP2's, as accelerate's own code was traced (``prepare_model`` in accelerate/accelerator.py, 1.15.0).
    under_autocast: bool
    selective: bool  # Whether selective checkpointing applies
    dropout: float  # Probability that applies to what is added to the residual stream
    attention_dropout: float  # The same, of attention's weights
    projections: StackProjections  # How projections of codes and with adapters run
    adapter_dropout: float  # Probability with which an adapter's input is dropped
    fp16: bool  # Whether products are computed in fp16, whose softmax in fp32 is one kernel
    computes_fp16: bool  # The same whatever attention is; only where codes are multiplied as integers
    code: FamilyCode  # What the model's code does otherwise than the bundled models
    regime: Regime  # What batch and length decide
    own_tables: bool  # Whether each layer has cosines and sines of its own, formed or gathered where it turns heads
    copies_tables: bool  # Whether each layer is given copies of rotary tables, narrower than the model's
    casts_tables_again: bool  # Whether what is computed again forms these anew
    table_rows: Quantity  # What rotary tables that a layer spreads have rows for: positions, or every token
    gathered_rows: bool  # Whether each layer gathers the rows of rotary tables that it needs
    copies_fused: bool  # Whether query, key and value are copied out of the result of one projection
    # Whether a product with a frozen weight saves its input too, as the function in Python does that DeepSpeed puts in
    # the place of torch's (``LinearFunctionForZeroStage3`` in deepspeed/runtime/zero/linear.py, 0.19.8).
    keeps_inputs: bool
    divided: bool  # Whether GPUs share each layer's matrices
    sequence: bool  # Whether they share the sequence too between these
    context: int  # GPUs that share each sequence, of which every one gathers all keys and values
    cache: Cache  # How keys and values are returned
    cache_stays: bool  # Whether the loop has a name for them until the next forward is done
    sees_all: bool  # Whether tokens see those behind them too, so that scores get a mask for padding alone
    names_hidden: bool  # Whether it has one for what each layer is given, too
    flash_attn: bool  # Whether attention is run by the package flash-attn, whatever its window or soft cap

    @property
    def stream(self) -> Quantity:
        """What the residual stream is proportional to."""
        return Quantity.SHARD_TOKENS if self.sequence else Quantity.TOKENS


def block_settings(spec: ModelSpec, setup: TrainingSetup, regime: Regime) -> BlockSettings:
    """Return what operations depend on; equal ones give equal tapes."""
    profile, own = KernelProfile(), setup.profile
    dropout, attention_dropout = dropouts(spec, setup)
    code, copies = family_code(setup.stack, spec.architecture), copies_tables(spec, setup)
    flat = setup.config.parallel.engine == "fsdp1" and setup.stack.model_code == "transformers"
    attention = setup.masked_attention if regime.masked and setup.masked_attention else own.attention
    return BlockSettings(
        names=spec.names,
        hidden_size=spec.hidden_size,
        profile=replace(
            profile,
            attention=attention,
            norm=own.norm,
            rotary=own.rotary,
            activation=own.activation,
            adapters=own.adapters,
            linear_attention=own.linear_attention,
        ),
        wide_attention=setup.wide_attention,
        compute_bytes=setup.compute_bytes,
        embedded_bytes=setup.embedded_bytes,
        residual_bytes=setup.residual_bytes,
        autocast=setup.autocast,
        under_autocast=setup.autocast or (flat and setup.config.compute_dtype != "fp32" and casts_shards(setup)),
        selective=setup.checkpointing == "selective",
        dropout=dropout,
        attention_dropout=attention_dropout,
        projections=setup.stack.projections,
        adapter_dropout=(setup.config.adapter.dropout or 0.0) if setup.config.adapter else 0.0,
        computes_fp16=setup.config.compute_dtype == "fp16" and setup.formats["hidden_matrix"].product == "integers",
        fp16=setup.config.compute_dtype == "fp16" and (own.attention == "eager" or steps_through_scores(spec, setup)),
        cache_stays="logits" in setup.stack.loop.holds,
        names_hidden=setup.names_hidden and "logits" in setup.stack.loop.holds,
        cache=_cache(spec, setup),
        sees_all=spec.encoder is not None,
        flash_attn=setup.runs_flash_attn,
        code=replace(code, wide_rotary=False) if copies else code,
        regime=regime,
        own_tables=tables_in_layers(spec, setup),
        copies_tables=copies,
        casts_tables_again=casts_tables_again(setup),
        table_rows=Quantity.TOKENS if setup.stack.rotary_tables.rows == "batch" else Quantity.POSITIONS,
        gathered_rows=setup.stack.rotary_tables.gathered,
        copies_fused=setup.stack.models.fused_qkv == "copies",
        divided=setup.config.parallel.tensor > 1,
        sequence=setup.config.parallel.tensor > 1 and setup.config.parallel.sequence,
        context=setup.config.parallel.context,
        keeps_inputs=is_partitioned(setup.config.parallel),
    )


def _cache(spec: ModelSpec, setup: TrainingSetup) -> Cache:
    """Return the form of keys and values that a forward returns."""
    # Source: ``Gemma3TextModel.forward`` in transformers/models/gemma3/modeling_gemma3.py, line 518 (4.57.6): ``and not
    # self.training``.
    uncached = setup.checkpointing != "none" or spec.architecture in setup.stack.models.uncached
    return setup.stack.loop.cache if spec.use_cache and not uncached else "none"
