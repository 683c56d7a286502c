"""A model over a grid of GPUs: from keywords to what each rank keeps and takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Unpack

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.hardware.hardware_tables import hardware_tables
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.catalog.training_config import Offload, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.job_options import JobInputs, JobOptions, ModelGiven, job_inputs
from memplan.library.lookup.config_lookup import read_config
from memplan.library.runs.grid_precision import precision_of
from memplan.model.spec import ModelSpec
from memplan.plan.allowances import engine_workspace_bytes
from memplan.plan.grids.grid_plan import GridPlan, outside_of
from memplan.report.document import Document
from memplan.step.grids.grid import Grid, grid_of
from memplan.step.grids.megatron_layers import MegatronBatch, MegatronKernels, RankSizes
from memplan.step.grids.megatron_peaks import StepInterval, step_intervals
from memplan.step.grids.megatron_states import MegatronSettings, StageStates, megatron_states
from memplan.step.grids.megatron_tensors import MegatronBuild
from memplan.step.grids.pipeline_stages import StageSplit, chunks_of, chunks_of_layout
from memplan.training.parallelism import divides_model
from memplan.training.resolution.config_problems import config_problems
from memplan.units import format_bytes, parse_bytes

STACK = "megatron"
"""The stack whose grids are planned, and that of a grid where none is named."""

OWN_PRECISION = {"weights": {"default": "bf16"}, "master_weights": "fp32", "optimizer": {"default": "adamw-fp32"}}
"""What Megatron-LM keeps with ``--bf16`` where no config says otherwise (megatron/training/arguments.py)."""

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""What ``--recompute-modules`` takes (core/transformer/transformer_config.py, 0.16.1)."""


@dataclass(frozen=True)
class Gridded(Answer):
    """What each rank of a grid keeps between steps and takes in one.

    Attributes:
        plan: All ranks.
        config: The training config.
        rank: The rank that is shown: ``worst``, ``all`` or its number.
        notes: What is taken for granted, one sentence each.
    """

    plan: GridPlan
    config: TrainingConfig
    rank: str
    notes: tuple[str, ...]
    catalog: Catalog

    @property
    def verdict(self) -> str:
        """``fits``, ``tight``, ``no``, or ``unknown`` where only the lower end fits."""
        return self.plan.verdict

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer as tables, sentences and JSON."""
        from memplan.report.plans.grid_answer import grid_document

        return grid_document(self.plan, self.rank, self.notes, self.catalog.hash if full else "", unit, strict=strict)


def _refuse_expert_degrees(grid: Grid, name: str) -> None:
    """Refuse to divide the experts of a model that has none."""
    for key, several in (("expert", grid.expert > 1), ("expert_tensor", grid.expert_tensor not in (1, grid.tensor))):
        if several:
            raise InvalidFileError([f"parallel.{key}: {name} has no experts to divide"])


def _unplanned(config: TrainingConfig, spec: ModelSpec) -> tuple[str, ...]:
    """Return what changes a step in a way that is not modelled."""
    named = config.parallel.megatron.unplanned
    if any(getattr(run.layer.attention, "sinks", False) for run in spec.runs):
        named = (*named, "attention with learned sinks (--softmax-type learnable)")
    if named:
        return named
    told = {
        "predicted_tokens: multi-token prediction": config.parallel.megatron.predicted_tokens,
        "muon: its orthogonalisation": config.parallel.megatron.muon != "none",
    }
    return tuple(f"parallel.megatron.{text}" for text, given in told.items() if given)


def is_grid(given: ModelGiven, options: JobOptions) -> bool:
    """Tell whether a job is Megatron-LM's, or divides a model and names no training config."""
    inputs = job_inputs("fit", given, options)
    config = _config(inputs)
    if _stack(config.stack) != STACK:
        return divides_model(config.parallel) and inputs.config is None and inputs.options.get("stack") is None
    return True


def _stack(name: str | None) -> str:
    return (name or "").partition("@")[0]


def _config(inputs: JobInputs) -> TrainingConfig:
    """Return the training config, with what the keywords change in it; where none is given, Megatron-LM's own precision."""
    given = inputs.config
    config = {"description": "Megatron-LM's own precision", **OWN_PRECISION} if given is None else given
    return read_config(config, inputs.overrides(inputs.gpus), inputs.catalog)


@checked
def plan_grid(model: ModelGiven = None, *, rank: str = "worst", **options: Unpack[JobOptions]) -> Gridded:
    """Return what the ranks of a grid keep between steps and take in one.

    Args:
        rank: ``worst``, ``all`` or a rank's number.
        options: Keywords of :class:`memplan.JobOptions`; degrees are keys of ``parallel`` in ``set`` or ``config``.

    Raises:
        InvalidFileError: Degrees that do not divide what they have to, or unknown keys.
        CannotAnswerError: A model, optimizer or format that is not modelled under Megatron-LM.

    Example:
        >>> import memplan
        >>> memplan.plan_grid("llama-3.1-8b", gpu="h100-sxm-80gb", gpus=8, set={"parallel.tensor": 8}).verdict
        'fits'
    """
    inputs = job_inputs("plan_grid", model, options)
    config = _config(inputs)
    if problems := [f"{'.'.join(path)}: {text}" for path, text in config_problems(config, inputs.catalog)]:
        raise InvalidFileError(problems)
    _refuse(config)
    known, device = inputs.model(), inputs.device()
    grid = grid_of(_laid_out(config.parallel), inputs.options.get("gpus"))
    routed = any(tensor.experts_per_token for tensor in known.inventory)
    if not routed:
        _refuse_expert_degrees(grid, known.spec.name)
    _check_sequences(config, grid, known.spec.name if routed else "")
    _check_micro_batches(config, grid)
    settings = _settings(config, inputs.catalog)
    stages = megatron_states(known.spec, grid, settings)
    chunks = chunks_of(known.spec.num_hidden_layers, grid, settings.split)
    batch = _batch(config, settings)
    tables = hardware_tables(inputs.catalog.root)
    kernels = replace(_kernels(config, batch), workspace_bytes=engine_workspace_bytes(device.gpu, tables))
    sizes = RankSizes(known.spec, grid, settings.build, batch, kernels)
    precision = settings.precision
    apart = not config.parallel.precision_aware or config.parallel.megatron.whole_copies
    copied = apart and precision.gradient_bytes < 4 == precision.master_bytes
    copies = [stage.fullest.master_weights * copied for stage in stages]
    unplanned = _unplanned(config, known.spec)
    steps = (StepInterval(0, 0, 0),) * len(stages) if unplanned else step_intervals(sizes, chunks, copies)
    share = inputs.catalog.tables.reserve_share(config.allocator, coded=False)
    outside = outside_of(grid, device, tables, share)
    usable = device.usable_bytes(parse_bytes(config.reserve))
    plan = GridPlan(known, device, grid, stages, steps, usable, outside, unplanned)
    _check_rank(rank, grid.world)
    notes = (*_notes(config, routed=routed), *_host_note(stages), *known.notes)
    return Gridded(plan, config, rank, notes, inputs.catalog)


def _check_sequences(config: TrainingConfig, grid: Grid, mixture: str) -> None:
    """Refuse sequences that a grid's ranks cannot share, and a mixture whose tensor ranks do not."""
    # Source: megatron-core 0.16.1 (core/): ``get_batch_on_this_cp_rank`` in utils.py,
    # ``_reduce_scatter_along_first_dim`` in tensor_parallel/mappings.py, ``MoELayer.forward`` in
    # transformer/moe/moe_layer.py
    length, parts = config.sequence_length, 2 * grid.context if grid.context > 1 else 1
    among = [f"2 x {grid.context} context parallel parts"] if grid.context > 1 else []
    if grid.sequence and grid.tensor > 1:
        parts = lcm(parts, grid.context * grid.tensor)
        among.append(f"{grid.tensor} tensor parallel ranks that share the sequence")
    if length % parts:
        near = max(length // parts * parts, parts)
        text = f"{length:,} tokens cannot be divided among {' and '.join(among)}; the nearest that can: {near:,}"
        raise InvalidFileError([f"sequence_length: {text}"])
    if mixture and grid.tensor > 1 and not grid.sequence:
        text = f"Megatron-LM trains {mixture}'s experts over {grid.tensor} tensor parallel ranks where they share the sequence"
        raise InvalidFileError([f"parallel.sequence: {text}; give --sequence-parallel"])


def _check_micro_batches(config: TrainingConfig, grid: Grid) -> None:
    """Refuse fewer micro-batches, where they are told, than a pipeline of several chunks has stages."""
    # Source: ``forward_backward_pipelining_with_interleaving`` in megatron/core/pipeline_parallel/schedules.py (0.16.1), which stops at fewer
    # than pass a chunk together too; a run of Megatron-LM's own tests, of an earlier commit, had 5 of 4 (tests/grids/megatron-measured.yaml)
    told = config.parallel.micro_batches is not None or config.gradient_accumulation_steps > 1
    count, stages = _micro_batches(config), grid.pipeline
    if told and grid.virtual > 1 and count < stages:
        text = f"{count:,} do not fill {stages:,} stages of {grid.virtual} chunks each"
        raise InvalidFileError([f"parallel.micro_batches: {text}; the nearest that does: {stages:,}"])


def _check_rank(rank: str, world: int) -> None:
    """Refuse a rank that is none of the job's."""
    if rank not in ("worst", "all") and not (rank.isascii() and rank.isdigit() and int(rank) < world):
        raise InvalidFileError([f"rank: expected worst, all or a number from 0 to {world - 1:,}, got {rank!r}"])


def _refuse(config: TrainingConfig) -> None:
    """Raise for what is not modelled of Megatron-LM's model states."""
    if _stack(config.stack) not in (STACK, DEFAULT_STACK):
        raise CannotAnswerError(f"stack: a model divided under {config.stack} is not modelled; it is under {STACK}")
    said = {
        "adapter": config.adapter,
        "offload": replace(config.offload, optimizer_states="none") != Offload(),
        "parallel.engine": config.parallel.engine != "torch",
        "gradients.lifetime": config.gradients.lifetime != "step",
        f"method.stage: {config.method.stage}": config.method.stage != "sft",
        "weight_average": config.weight_average != "none",
    }
    own = Parallel(pipeline=config.parallel.pipeline, virtual=_laid_out(config.parallel).virtual)
    for name in ("schedule", "stage", "first_stage_less_layers", "last_stage_less_layers"):
        if getattr(config.parallel, name) not in (getattr(own, name), own.order if name == "schedule" else None):
            text = (
                "Megatron-LM has no such setting: it runs 1F1B, interleaved with --vp; torchtitan's pipelines have it"
            )
            raise InvalidFileError([f"parallel.{name}: {text}"])
    if config.parallel.megatron.compiled_loss and config.kernels.loss is not None:
        raise InvalidFileError(
            [f"parallel.megatron.compiled_loss: kernels.loss: {config.kernels.loss} is another loss; give one"]
        )
    for name, given in said.items():
        if given:
            raise CannotAnswerError(
                f"{name} is not modelled under Megatron-Core, nor where tensors or pipelines divide a model"
            )


def _laid_out(parallel: Parallel) -> Parallel:
    """Return degrees with as many chunks of a stage as a layout of them has."""
    if parallel.stage_layout is None:
        return parallel
    return replace(parallel, virtual=max(len(chunks_of_layout(parallel.stage_layout)) // parallel.pipeline, 1))


def _settings(config: TrainingConfig, catalog: Catalog) -> MegatronSettings:
    parallel = config.parallel
    split = StageSplit(
        parallel.first_stage_layers,
        parallel.last_stage_layers,
        parallel.embedding_as_layer,
        parallel.loss_as_layer,
        parallel.megatron.predicted_tokens,
        parallel.stage_layout,
    )
    told = parallel.megatron
    build = MegatronBuild(
        parallel.transformer_impl, parallel.vocabulary_multiple, told.predicted_tokens, told.grouped_experts
    )
    overlaps, size, buckets = parallel.overlap_gradients, told.bucket_elements or 0, told.buckets or 0
    precision = precision_of(config, catalog)
    return MegatronSettings(split, build, precision, overlaps, told.padded_buckets, size, buckets, told.muon)


def _micro_batches(config: TrainingConfig) -> int:
    """Return the micro-batches of a step, which Megatron-LM's schedules run together."""
    return config.gradient_accumulation_steps * (config.parallel.micro_batches or 1)


def _batch(config: TrainingConfig, settings: MegatronSettings) -> MegatronBatch:
    """Return what a step is given; a loss of another kind than Megatron-LM's own may have no logits in fp32."""
    modules = {name.strip("[]'\"") for name in config.parallel.recompute_modules} - {""}
    if unknown := sorted(modules.difference(RECOMPUTE_MODULES)):
        raise InvalidFileError(
            [f"parallel.recompute_modules: {', '.join(unknown)}: expected some of {', '.join(RECOMPUTE_MODULES)}"]
        )
    return MegatronBatch(
        config.micro_batch_size,
        config.sequence_length,
        _micro_batches(config),
        config.activation_checkpointing == "full",
        frozenset(modules) if config.activation_checkpointing == "selective" else frozenset(),
        settings.precision.weight_bytes,
        wide_logits=settings.precision.weight_bytes < 4 and config.kernels.loss is None,
        copied_softmax=config.parallel.megatron.compiled_loss and config.kernels.loss is None,
    )


def _kernels(config: TrainingConfig, batch: MegatronBatch) -> MegatronKernels:
    """Return what runs: scores are formed where a config says so, and in fp32, which no fused attention takes."""
    engine = config.parallel.transformer_impl == "transformer_engine"
    fused = engine and batch.element_bytes == 2 and config.kernels.attention != "math"
    dropout, told = bool(config.dropout), config.parallel.megatron
    return MegatronKernels(
        engine,
        engine and told.fused_gradients,
        engine and told.fused_rotation,
        fused,
        dropout,
        dropout,
        told.expert_dispatch == "allgather",
        told.grouped_experts,
        batch.micro_batch_size,
    )


def _notes(config: TrainingConfig, *, routed: bool) -> tuple[str, ...]:
    """Return what is taken for granted."""
    parallel = config.parallel
    modules = "modules with Transformer Engine" if parallel.transformer_impl == "transformer_engine" else "own modules"
    notes = [
        f"Megatron-LM's {modules} (megatron-core 0.16.1); the vocabulary is padded to a multiple of {parallel.vocabulary_multiple} times the tensor degree"
    ]
    if not parallel.zero_stage:
        notes.append(
            "every data parallel rank keeps all optimizer states, as without --use-distributed-optimizer; --zero 1 divides them"
        )
    if not parallel.overlap_gradients:
        notes.append("gradients are one buffer, as without --overlap-grad-reduce")
    if parallel.sequence and parallel.tensor == 1:
        notes.append("one tensor parallel rank has the whole sequence, which parallel.sequence does not change")
    if parallel.megatron.unplanned:
        return tuple(notes)
    count = _micro_batches(config)
    notes.append(
        f"activations are those of {config.micro_batch_size:,} x {config.sequence_length:,} tokens, "
        f"{count:,} micro-batch{'es' * (count > 1)} a step, recompute {config.activation_checkpointing or 'none'}, "
        f"{f'dropout {config.dropout:g}' if config.dropout else 'no dropout'}"
    )
    fused = parallel.transformer_impl == "transformer_engine" and config.kernels.attention != "math"
    notes.append(
        "attention is flash's or cuDNN's, which forms no scores"
        if fused
        else "attention forms scores, of every pair of tokens"
    )
    if routed:
        notes.append("every expert is given as many tokens; experts' rows were read in source, not traced")
    return tuple(notes)


def _host_note(stages: Sequence[StageStates]) -> tuple[str, ...]:
    """Return what the fullest rank keeps in host memory, in words; nothing where it keeps nothing there."""
    most = max(stage.fullest.host for stage in stages)
    if not most:
        return ()
    return (f"fp32 copies, gradients and states are updated in host memory, {format_bytes(most)} of a rank at most",)
