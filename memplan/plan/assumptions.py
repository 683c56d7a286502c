"""What a plan takes for granted and what it leaves out, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memplan.catalog.config_keys.method_keys import Embedding, Rollout
from memplan.model.inventory import parameter_count
from memplan.model.routed_experts import expert_modules_of
from memplan.plan.model_notes import LINEAR_ALONE, experts_format, phase_notes, recurrent_kernels, teacher_note
from memplan.step.kernels.family_code import dropouts
from memplan.step.kernels.refused_row_masks import may_pad
from memplan.step.states.optimizer_scratch import most_together
from memplan.step.states.parallel_shards import is_sharded, runs_engine
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tensors.tensor_states import reference_setup
from memplan.step.tensors.update_kernels import unproven_updates
from memplan.units import format_bytes, format_fraction

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan

ADAPTER_TENSORS = ("lora_A.weight", "lora_B.weight")

REFERENCES = {
    "resident": "a frozen second copy in {}; its forward runs before backward, beside all that forward has saved",
    "adapter-off": "the model without its adapters; its forward runs before backward, beside all that forward has saved",
    "precomputed": "none on the device; its log-probabilities have been computed before",
}
"""Kind of reference model -> what there is of it."""

LINEAR_ATTENTION = {
    "torch": "linear attention torch: transformers' own code runs gated delta networks, in fp32, as it does where "
    "flash-linear-attention and causal-conv1d are not installed; kernels.linear_attention: fla is with both, and needs less",
    "fla": "linear attention fla: flash-linear-attention and causal-conv1d are installed; what their kernels save and allocate "
    "is that of flash-linear-attention 0.6.0 and causal-conv1d 1.7.0",
    "torch-scan": "linear attention torch: transformers' own code runs state space layers, in fp32, as it does where mamba-ssm and "
    "causal-conv1d are not installed; kernels.linear_attention: mamba is with both, and needs less",
    "mamba": "linear attention mamba: mamba-ssm and causal-conv1d are installed; what their kernels save and allocate is that of mamba-ssm "
    "2.3.2 and causal-conv1d 1.7.0, with heads split as on a card of 132 multiprocessors",
}
"""Kernels of linear attention, or of state space layers -> what is assumed to be installed."""

CONVOLUTIONS = {
    "torch": "short convolutions torch: torch's own conv1d runs them, as it does in transformers where causal-conv1d is not installed "
    "(use_kernel_func_from_hub_with_fallback in integrations/hub_kernels.py, 5.23.0); kernels.linear_attention: fla is with it",
    "fla": "short convolutions fla: causal-conv1d is installed, and transformers runs its kernel (causal_conv1d_interface.py, 1.7.0)",
}
"""The same for models with short convolutions."""

DOUBTS = {
    "model": "a padded copy of the logits where their width is no multiple of 8, which the compiler decides by a timing "
    "(torch/_inductor/fx_passes/pad_mm.py)",
    "layers": "the worst order of kernels that the compiler tries, were no memory used again (reorder_for_peak_memory in "
    "torch/_inductor/memory.py); not counted: other kernels, as flex attention fused with what is around it",
}
"""What a compiler compiles -> what the upper end has for it."""


def assumptions(plan: MemoryPlan) -> tuple[str, ...]:
    """Return what the answer takes for granted."""
    return (*_step(plan), *_states(plan), *_several(plan), *_model(plan))


def _several(plan: MemoryPlan) -> Iterator[str]:
    if plan.setup.config.parallel.gpus > 1:
        from memplan.plan.parallel_assumptions import parallel_assumptions

        yield from parallel_assumptions(plan)


def not_modelled(plan: MemoryPlan) -> tuple[str, ...]:
    """Return what the answer leaves out."""
    return tuple(_left_out(plan))


def _doubt(plan: MemoryPlan) -> str:
    """Return what the upper end has for what a compiler may do besides."""
    more = f"{format_bytes(plan.doubt_bytes)} besides," if plan.doubt_bytes else "no more"
    return f"{more} for {DOUBTS[plan.setup.config.compile]}"


def _step(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is assumed of every step."""
    config, profile = plan.setup.config, plan.setup.profile
    yield (
        f"kernels ({plan.setup.stack.name}): attention {plan.attention}, norm {profile.norm}, rotary {profile.rotary}, "
        f"activation {profile.activation}, optimizer {profile.optimizer}, newton_schulz {profile.newton_schulz}, loss {profile.loss}"
    )
    if profile.muon_batch_bytes:
        yield _batches(plan)
    yield from _method(plan)
    if words := config.freeze.words:
        trained = parameter_count(tensor for tensor in plan.model.inventory if not tensor.frozen)
        yield f"frozen but for {words}: {trained:,} of {parameter_count(plan.model.inventory):,} parameters train"
    if kernels := recurrent_kernels(plan):
        yield LINEAR_ATTENTION[kernels]
    if plan.model.spec.convolves:
        yield CONVOLUTIONS[plan.setup.profile.linear_attention]
    yield from plan.setup.card_notes
    if config.compile != "none":
        yield (
            f"compile {config.compile}: buffers are those of the programs that torch 2.13.0's compiler writes for a Hopper card with "
            f"its defaults, read without a GPU and measured on none; the upper end has {_doubt(plan)}"
        )
    if plan.setup.captures_step:
        yield (
            "forward and backward are captured as a CUDA graph, whose memory serves nothing else: gradients stay from step to "
            f"step, filled with zeros, and with the scratch of clipping and the update {format_bytes(plan.apart_bytes)} are reserved "
            "beyond the peak"
        )
    yield f"a steady-state step: optimizer states exist, {_rows(plan)}"
    yield _allocator(plan)


def _rows(plan: MemoryPlan) -> str:
    """Return how long the rows of a micro-batch are."""
    setup = plan.setup
    if plan.pads_rows:
        return "rows are padded to the longest, of full length, for which attention is given a mask"
    full = "every sequence has the full length"
    if plan.padding_bytes:
        return (
            f"{full}; rows of several lengths are padded, for which attention is given a mask: the upper end has {format_bytes(plan.padding_bytes)} "
            "for it (padded_rows: true plans it, false says that no row is padded)"
        )
    if may_pad(setup, plan.micro_batch_size):
        return f"{full}: rows of several lengths are padded, for which attention is given a mask (padded_rows: true)"
    return full


def _allocator(plan: MemoryPlan) -> str:
    """Return whose allocator's reserve is planned, and how."""
    kind: str = plan.setup.config.allocator or "native"
    if kind == "expandable" and plan.setup.stack.allocator != "native":
        kind += f" ({plan.setup.stack.name}'s own PYTORCH_CUDA_ALLOC_CONF)"
    if not plan.reserve_by_share:
        return (
            f"allocator: {kind}, simulated from the first weight through three steps; what remains in the interval "
            "is the device context, the addresses that the driver chooses, and how far the allocator releases its cache"
        )
    expected, upper = (
        format_fraction(share * 100)
        for share in (plan.allowances.reserve_fraction, plan.allowances.upper_reserve_fraction)
    )
    return (
        f"allocator: {kind}; a reserve of {expected} % of the allocated bytes, the smallest with which a step "
        f"still runs; {upper} % at the upper end; not simulated: {plan.reserve_by_share}"
    )


def _batches(plan: MemoryPlan) -> str:
    """Return what ``kernels.muon_batch_bytes`` does."""
    budget = format_bytes(plan.setup.profile.muon_batch_bytes)
    most = most_together(plan.setup, plan.states.tensors)
    if most == 1:
        return f"kernels.muon_batch_bytes {budget}: Muon updates no two matrices of this job together, and it changes nothing"
    return f"Muon updates up to {most} matrices of one shape together, in up to {budget} of scratch"


def _method(plan: MemoryPlan) -> Iterator[str]:
    """Yield what a step on preferences has beside the model."""
    method, rows = plan.setup.config.method, plan.setup.rows_per_sample
    if plan.setup.config.joined_rows:
        joined = plan.micro_batch_size * plan.sequence_length
        yield f"rows of a micro-batch are joined to one of {joined:,} tokens, which attend under a mask of all by all"
    if method.stage == "sft":
        return
    if method.embedding is not None:
        yield _texts(method.embedding)
        return
    pairs = f", {rows} rows for each pair: chosen and rejected" if rows > 1 else ""
    if plan.setup.generates_rows:
        yield from _own_rows(plan)
    elif method.rollout is None:
        tokens = "rows are full" if method.stage == "classification" else "every token of a row is one of the answer"
        yield f"method {method.stage}{pairs}; {tokens}"
        if method.stage == "kto" and plan.setup.profile.loss == "log-probabilities":
            yield "every answer is taken to be desirable; metrics copy logits of those that are, and of those that are not"
    elif plan.setup.value_model is not None:
        yield from phase_notes(plan)
    else:
        yield from _rollout(plan, method.rollout)
    if plan.setup.scores:
        count = plan.setup.score_count
        scores = "one number" if count == 1 else f"{count} scores"
        yield f"the head yields {scores} for each token in place of logits, and is trained"
    if plan.setup.has_value_head:
        yield "a head of values in fp32 is trained; the model's own forms logits and a loss too, to which no gradient comes"
    if plan.setup.teacher is not None:
        yield teacher_note(plan, plan.setup.teacher)
    if method.reference_model != "none":
        own = plan.setup.config.compute_dtype if reference_setup(plan.setup) is not plan.setup else "the same formats"
        yield f"reference model: {REFERENCES[str(method.reference_model)].format(own)}"
    if method.reference_model == "resident" and is_sharded(plan.setup.config.parallel):
        yield "TRL shards the reference model as one unit: in its forward all of it is there twice, in the buffer it is gathered in and copied out"


def _texts(texts: Embedding) -> str:
    """Return which texts pass through the model, and how they are compared."""
    how = "each column in a forward of its own"
    if texts.mini_batch_size is not None:
        how = f"{texts.mini_batch_size} rows at a time, twice, the second time with gradients"
    elif len(texts.forwards) < texts.columns:
        how = f"the first column in a forward, and the {texts.columns - 1} others together in another"
    return f"method embedding: {texts.columns} texts of each example, all of them of full length, {how}; pooling {texts.pooling}, loss {texts.loss}"


ENGINES = {
    "transformers": "the model itself generates, with a cache of keys and values",
    "vllm": "vLLM generates on the same GPU and takes a stated share of it",
    "server": "a server generates, on other GPUs",
}


def _own_rows(plan: MemoryPlan) -> Iterator[str]:
    """Yield how the rows of a step are generated that may also be those of the data."""
    length = plan.setup.completion_length
    cache = (
        "with a cache of keys and values"
        if plan.setup.caches_generated
        else "without a cache, as layers are checkpointed"
    )
    yield (
        f"method {plan.setup.config.method.stage}: the model generates the last {length:,} tokens of each row by itself, {cache}; every "
        "token counts as one of the answer, as in rows of the data"
    )


def _rollout(plan: MemoryPlan, rollout: Rollout) -> Iterator[str]:
    """Yield what is generated, together, and by what."""
    setup, prompt = plan.setup, plan.sequence_length - rollout.completion_length
    rows = plan.micro_batch_size * setup.generated_micro_batches
    yield (
        f"method {setup.config.method.stage}: {rows} completions of {rollout.completion_length:,} tokens are generated "
        f"together, each behind a prompt of {prompt:,}; none ends earlier"
    )
    asleep = ", and sleeps while a step runs" if rollout.sleeps and rollout.engine == "vllm" else ""
    scored = "; rewards are computed elsewhere" if setup.teacher is None else ""
    yield f"generation: {ENGINES[rollout.engine]}{asleep}{scored}"


def _states(plan: MemoryPlan) -> Iterator[str]:
    """Yield which weights stay as they are, where optimizer states in host memory lie, and who steps them."""
    if experts := experts_format(plan):
        yield f"experts stay in {experts}: {LINEAR_ALONE}"
    if number := max(map(expert_modules_of, plan.model.spec.runs)):
        rows = plan.values[Quantity.EXPERT_ROWS]
        yield (
            f"experts: {number} modules that run one after another, as before transformers 5.0, each on {rows:,} rows, as balanced "
            "routing has it; one that is given more needs more while it runs"
        )
    if plan.setup.offloads_states:
        yield (
            f"optimizer states: {plan.host_bytes:,} B of pinned host memory; the bundled optimizer steps, tensor by tensor, "
            "and two chunks of a tensor's states at a time are on the device; torch rounds each pinned tensor up to a "
            "power of two, so the host may need up to twice as much (https://github.com/pytorch/pytorch/issues/150517)"
        )
    if plan.host.tensors:
        yield (
            f"host memory: {plan.host.taken_bytes:,} B for each rank ({plan.host.words()}), pinned tensors rounded up to "
            f"powers of two as torch does, and {plan.node_host_bytes:,} B on a node of {plan.node_ranks}; what every process takes for "
            "itself, and a checkpoint that is loaded or saved, come on top"
        )


def _model(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is assumed of the model, and of the device that it is put on."""
    config, spec = plan.setup.config, plan.model.spec
    residual, attention = dropouts(spec, plan.setup)
    if (residual or attention) and config.dropout is None:
        within = "" if attention == residual else f", {attention} of attention's weights"
        retained = ", which the trainer cannot switch off" if plan.setup.disables_dropout else ""
        yield f"dropout {residual}{within}, the model's own{retained}"
    roles = {
        entry.tensor.role
        for entry in plan.states.tensors
        if entry.format_name != plan.setup.format_names[entry.tensor.role]
        and not entry.tensor.name.endswith(ADAPTER_TENSORS)
    }
    if roles:
        yield f"{', '.join(sorted(roles))}: tensors whose rows do not divide into blocks stay in {config.compute_dtype}"
    if plan.device.count > 1:
        yield "memory of several devices is pooled: everything sharded evenly, nothing replicated, no communication buffers"
    if 0 < spec.learned_positions == plan.sequence_length:
        yield f"sequence length {plan.sequence_length}: all of the model's learned positions"
    elif 0 < spec.max_position_embeddings < plan.sequence_length:
        yield f"sequence length {plan.sequence_length} is beyond the model's max_position_embeddings of {spec.max_position_embeddings}"
    if plan.device.gpu.unified_memory:
        yield "unified memory: the operating system and other programs take their share of it too"
    if plan.model.quantization:
        yield f"released in {plan.model.quantization}; planned in the config's own weight formats"
    yield from plan.model.notes


def _left_out(plan: MemoryPlan) -> Iterator[str]:
    family = plan.model.spec.architecture
    if family in plan.setup.family_gaps:
        yield f"{family} in transformers: {plan.setup.family_gaps[family].text}"
    yield "memory of other processes and of the desktop (set reserve for it)"
    yield "scratch of the sort in the embedding's backward"
    yield from unproven_updates((e.optimizer_name, e.optimizer, e.stepper) for e in plan.states.tensors)
    parallel = plan.setup.config.parallel
    if parallel.gpus > 1:
        more = (
            "more communicators than one for each group"
            if parallel.tensor * parallel.expert > 1
            else "more than one communicator"
        )
        yield f"other kinds of parallelism, links between nodes, and NCCL with {more}"
    if parallel.pipeline > 1:
        yield "what is being sent to the next stage and is kept until it has arrived, where the schedule has let go of it"
    if parallel.engine == "fsdp1":
        yield "blocks that FullyShardedDataParallel's streams still use when they are let go of (record_stream), which come back later"
    stack = plan.setup.stack
    if runs_engine(plan.setup.config.parallel) and stack.name not in ("transformers", "trl"):
        yield f"what {stack.name}'s own loop does around DeepSpeed: its engine was held against transformers' Trainer and TRL's"
    if is_sharded(plan.setup.config.parallel) and not stack.own_models and stack.sharded_units == "root":
        yield f"how {stack.name} itself divides a model: these units of fully_shard were not held against its own code"
