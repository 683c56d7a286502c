"""Which gated delta networks, short convolutions and state space layers no code runs, or none that is modelled."""

from collections.abc import Iterator

from memplan.errors import CannotAnswerError
from memplan.model.gated_delta_net import GatedDeltaNet
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import ModelSpec
from memplan.model.state_space import StateSpace
from memplan.training.adapted_ends import selects
from memplan.training.resolved import TrainingSetup

UNADAPTED = ("out_proj", "conv1d")
"""Modules that PEFT puts no adapter on in some families (``_check_lora_target_modules_mamba`` in peft/tuners/tuners_utils.py, 0.21.2)."""

KERNELS = {
    "gated delta networks": ("torch", "fla"),
    "short convolutions": ("torch", "fla"),
    "state space layers": ("torch", "mamba"),
}
"""Parts that are no attention -> what runs them (``kernels.linear_attention``)."""


def refuse_recurrences(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for parts that are no attention where nothing runs them, or not as they are modelled.

    Raises:
        CannotAnswerError: Another library's models than transformers', kernels of other parts, fused adapters, selective
            checkpointing, or what one of these parts alone is refused with.
    """
    if spec.linear_attention and setup.stack.model_code != "transformers":
        raise CannotAnswerError(
            f"{spec.name} has gated delta networks, a linear attention, which models of transformers run and those of stack "
            f"{setup.stack.name} do not: use a stack of transformers, such as --stack trl"
        )
    has = dict(zip(KERNELS, (spec.linear_attention, spec.convolves, spec.state_space is not None), strict=True))
    for parts in [name for name in KERNELS if has[name]]:
        for text in _unmodelled(parts, setup):
            raise CannotAnswerError(text.format(f"{parts}, which {spec.name} has"))
    if spec.layer_input or any(getattr(run.layer.attention, "reuses", False) for run in spec.runs):
        _refuse_handed_down(spec, setup)
    if spec.linear_attention:
        _refuse_networks(spec, setup)
    if spec.convolves:
        _refuse_convolutions(spec, setup)
    if spec.state_space is not None:
        _refuse_state_space(spec, setup, spec.state_space)


def _unmodelled(parts: str, setup: TrainingSetup) -> Iterator[str]:
    """Yield what is modelled for none of these parts, with a place for them."""
    if (given := setup.profile.linear_attention) not in KERNELS[parts]:
        others = " or ".join(KERNELS[parts])
        yield f"kernels.linear_attention: {given} has no kernels for {{}}: use {others}"
    if setup.profile.fused_adapters:
        yield f"kernels.adapters: {setup.profile.adapters} is not modelled for {{}}"
    if setup.checkpointing == "selective":
        yield "activation_checkpointing: selective is not modelled for {}: use full"


def _refuse_handed_down(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for embeddings of every layer, and keys and values of earlier ones, under what is not followed for them."""
    has = f"embeddings of every layer, or layers that share keys and values, which {spec.name} has,"
    if setup.config.parallel.gpus > 1:
        raise CannotAnswerError(f"parallel: {has} are modelled on one GPU")
    if setup.checkpointing == "selective":
        raise CannotAnswerError(f"activation_checkpointing: selective is not modelled with {has[:-1]}: use full")
    if setup.config.gradients.lifetime == "layer":
        raise CannotAnswerError(f"gradients.lifetime: layer is not modelled with {has[:-1]}: use step")


def _refuse_networks(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for gated delta networks in fp32, or of shapes that their kernels do not take."""
    if setup.profile.linear_attention == "fla":
        _refuse_fla(spec)
    elif setup.config.compute_dtype == "fp32":
        raise CannotAnswerError(
            "compute_dtype: in fp32 transformers' own code of gated delta networks takes its inputs as they lie, and copies them for "
            f"some lengths, which is not modelled: use bf16 for {spec.name}, or kernels.linear_attention: fla"
        )


def _refuse_convolutions(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for short convolutions that their kernel does not take."""
    # Source: csrc/causal_conv1d.cpp (1.7.0), lines 289 and 301.
    sizes = {part.kernel_size for run in spec.runs if isinstance(part := run.layer.attention, ShortConvolution)}
    if setup.profile.linear_attention == "fla" and (spec.hidden_size % 8 or not sizes <= {2, 3, 4}):
        raise CannotAnswerError(
            f"kernels.linear_attention: fla has no kernel for a convolution like {spec.name}'s, of channels that are no multiple of 8 or "
            "over other than 2 to 4 tokens: use torch"
        )


def _refuse_state_space(spec: ModelSpec, setup: TrainingSetup, part: StateSpace) -> None:
    """Raise for adapters that PEFT refuses, an engine of shards that is not followed, or a shape whose products need no copies."""
    parallel = setup.config.parallel
    if parallel.engine != "torch" or parallel.tensor > 1 or parallel.context > 1:
        raise CannotAnswerError(
            f"parallel: state space layers, which {spec.name} has, are modelled over GPUs with data parallelism and torch's fully_shard alone "
            "(parallel.zero_stage: 0 or 3)"
        )
    _refuse_adapted(spec, setup, part)
    if setup.profile.linear_attention == "mamba":
        _refuse_mamba(spec, setup, part)
    if min(part.num_heads, part.head_dim, part.state_size, part.chunk_tokens) == 1:
        raise CannotAnswerError(
            f"{spec.name}: state space layers with one head, heads of one number, or states or chunks of one are not modelled"
        )


def _refuse_mamba(spec: ModelSpec, setup: TrainingSetup, part: StateSpace) -> None:
    """Raise for what mamba-ssm's function of a whole layer does not take, or not as it is modelled."""
    # Source: ``MambaSplitConv1dScanCombinedFn`` in mamba_ssm/ops/triton/ssd_combined.py (2.3.2), whose ``F.linear`` reads the weight of
    # ``out_proj`` itself, and whose ``ensure_stride`` copies rows that are no multiple of 8; csrc/causal_conv1d.cpp (1.7.0).
    adapter = setup.config.adapter
    limits = {
        "a model that fills a cache as it trains (kernels of other functions run then)": setup.stack.loop.cache
        != "none"
        and spec.use_cache
        and setup.checkpointing == "none",
        "codes as weights, which it reads itself": setup.formats["hidden_matrix"].training != "float",
        "weights in fp32 under autocast": setup.autocast and setup.loaded_float == "fp32",
        "adapters on out_proj, whose weight it reads alone": adapter is not None
        and ("all-linear" in adapter.targets or selects(adapter.targets, f"{part.prefix}.out_proj")),
        "a convolution over other than 2 to 4 tokens": not 2 <= part.kernel_size <= 4,
        "widths that are no multiple of 8": (part.projected_size | part.convolved_size) % 8 > 0,
    }
    for what in [name for name, beyond in limits.items() if beyond]:
        raise CannotAnswerError(f"kernels.linear_attention: mamba is not modelled with {what} ({spec.name}): use torch")


def _refuse_adapted(spec: ModelSpec, setup: TrainingSetup, part: StateSpace) -> None:
    """Raise for adapters on modules of state space layers that PEFT puts none on."""
    if setup.config.adapter is None or part.adapted:
        return
    for module in UNADAPTED:
        targets = setup.config.adapter.targets
        if selects(targets, f"{part.prefix}.{module}") or ("all-linear" in targets and module != "conv1d"):
            raise CannotAnswerError(
                f"adapter.targets: PEFT puts no adapter on {module} of {spec.architecture}, whose kernels read its weight alone "
                f"({spec.name}): name others, such as [q_proj, k_proj, v_proj, o_proj, in_proj]"
            )


def _refuse_fla(spec: ModelSpec) -> None:
    """Raise for shapes that the kernels of linear attention do not take."""
    # Source: ``chunk_gated_delta_rule_fwd_h`` in fla/ops/common/chunk_delta_h.py (fla-core 0.6.0), line 659;
    # csrc/causal_conv1d.cpp (1.7.0), lines 289 and 301.
    for part in [run.layer.attention for run in spec.runs]:
        if not isinstance(part, GatedDeltaNet):
            continue
        limits = {
            "heads of keys wider than 256": part.key_head_dim > 256,
            "a convolution over other than 2 to 4 tokens": not 2 <= part.kernel_size <= 4,
            "a convolution over channels that are no multiple of 8": part.convolved_size % 8 > 0,
        }
        for what in [name for name, beyond in limits.items() if beyond]:
            raise CannotAnswerError(
                f"kernels.linear_attention: fla has no kernel for {what}, which {spec.name} has: use torch"
            )
