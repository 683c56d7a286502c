"""A model as a stack builds it: its own projections, its own head, its own vocabulary."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from memplan.catalog.built_models import StackModels
from memplan.errors import CannotAnswerError
from memplan.model.families import around
from memplan.model.model import Model
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import Attention, Layer, LayerRun, MixtureOfExperts, Mlp, ModelSpec, TensorNames, layer_runs
from memplan.model.tower import TEXTS
from memplan.training.adapted_ends import headless, untied, with_saved_cast
from memplan.training.image_models import multiplies_integers, noted, with_tower
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.embedding_rules import cached_refusals, encoder_refusals
from memplan.training.rules.frozen_rules import with_frozen
from memplan.training.wide_roles import with_wide_roles
from memplan.units import round_up

CAST_BACK = ("lm_head", "embed_tokens", "wte", "wpe")
"""Embeddings that TRL casts back to bf16, by name (``peft_module_casting_to_bf16`` in trl/experimental/utils.py, 1.16.0)."""

TEXT_ALONE = "runs the text model alone: vision tower and projector are left out"

UNCHECKPOINTED = "checkpoints no layer of this model, whatever is asked for: its code never runs one again"

GROUPED_ROW_ELEMENTS = 8
"""Elements in bf16 that a row of a grouped product's result is padded to a multiple of (``GroupedMMUtils.h``, v2.13.0)."""


def built_by(model: Model, setup: TrainingSetup) -> Model:
    """Return a model as the stack of a setup builds it, and as its parameters are frozen.

    Raises:
        CannotAnswerError: The stack has no code for its family, or puts adapters on it or narrows its weights in a way
            of its own.
        InvalidFileError: No parameter of it trains.
    """
    return with_frozen(untied(_built(model, setup), setup), setup.config.freeze, f"{setup.name}: freeze")


def with_model_built(setup: TrainingSetup, model: Model, released: Model) -> TrainingSetup:
    """Return a setup that says what became of a model's ends as it was built: whether copies have untied them, whether
    the embedding stays in the dtype that it was loaded in, and whether a norm stands behind it.

    Source:
        ``_setup_freeze_tuning`` in llamafactory/model/adapter.py (0.9.5), which casts what trains to fp32.
    """
    if untied(released, setup) is not released:
        setup = replace(setup, untied_ends=True)
    models, tables = setup.stack.models, setup.stack.rotary_tables
    family = model.spec.architecture
    if family in (*models.kept_tables, *models.formed_tables):
        tables = replace(
            tables, each="layer", rows="model" if family in models.kept_tables else "sequence", dtype="loaded"
        )
        setup = replace(setup, stack=replace(setup.stack, rotary_tables=tables))
    if family in models.uncheckpointed:
        setup = replace(setup, uncheckpointed=True)
    if model.spec.embedding_norm is not None:
        setup = replace(setup, widens_stream=True)
    setup = with_wide_roles(with_saved_cast(setup, model), model)
    table = f"{model.spec.names.embedding}.weight"
    frozen = any(tensor.frozen for tensor in model.inventory if tensor.name == table)
    return replace(setup, frozen_embedding=True) if frozen and setup.stack.vision == "frozen-as-loaded" else setup


def _built(model: Model, setup: TrainingSetup) -> Model:
    """Return a model as the stack of a setup builds it, whatever of it trains."""
    if model.spec.tower is not None:
        model = _with_tower(model, setup)
    for text in chain(_unfollowed_dtypes(model, setup), _unfollowed_parts(model, setup)):
        raise CannotAnswerError(f"{setup.name}: {text}")
    rules = setup.stack.models
    if rules.experts == "apart":
        _refuse_experts(model.spec, setup)
    if rules.experts == "modules":
        _refuse_modules(model.spec, setup)
    if model.spec.architecture in rules.uncheckpointed and setup.asks_for_checkpointing:
        model = noted(model, f"{setup.stack.label} {UNCHECKPOINTED}")
    spec = _built_spec(model.spec, rules)
    if spec.architecture in rules.uncapped and setup.attention_choice != "eager":
        spec = _uncapped(spec)
    if setup.scores:
        return _scoring(model, spec, setup)
    spec = headless(spec) if setup.config.method.embedding is not None else spec
    return model if spec == model.spec else replace(model, spec=spec, inventory=inventory_of(spec))


def _unfollowed_dtypes(model: Model, setup: TrainingSetup) -> Iterator[str]:
    """Yield the adapters and dtypes of a job whose way through its stack's code nobody has followed, each with its key."""
    stack, spec, narrow = setup.stack, model.spec, setup.config.compute_dtype
    alone = setup.autocast and not setup.config.parallel.zero_stage
    if setup.config.adapter is not None and stack.models.families and not stack.models.adapted:
        yield f"adapter: adapters on models of {stack.label} are not modelled yet"
    if setup.config.adapter is not None and setup.config.adapter.kind == "dora" and not stack.models.dora:
        yield f"adapter.kind: DoRA of the time of {stack.label}, as PEFT 0.11 ran it, is not modelled; use lora"
    if alone and stack.shards_alone:
        yield (
            f"compute_dtype: {narrow} over fp32 weights is not modelled for {stack.label}, which wraps a model on one GPU in "
            "FSDP over a group of one; use weights: bf16, or compute_dtype: fp32"
        )
    reruns = (
        setup.checkpointing == "full" and not stack.checkpointing.early_stop
    )  # its second graph lives as long as the first
    if alone and stack.autocast == "always" and reruns and setup.format_names["hidden_matrix"] == narrow:
        yield (
            f"activation_checkpointing: full over {narrow} weights on one GPU, where {stack.label} runs under autocast, is not "
            "modelled; use weights: fp32, selective, or several GPUs"
        )
    if setup.config.autocast is False and stack.kbit_floats == "fp32-but-ends" and multiplies_integers(setup):
        yield (
            f"autocast: LLM.int8 without it, as {stack.label} casts beside it, is not modelled; leave it out, there bf16: true"
        )
    embedding = spec.names.embedding.rpartition(".")[-1]
    if stack.kbit_floats == "fp32-norms" and setup.kbit_floats and embedding not in CAST_BACK:
        yield (
            f"model: {stack.label} casts an embedding that is called {embedding} to fp32 beside quantised matrices, and its "
            "head not, which is not modelled; use lora over bf16"
        )
    stacked = any(run.layer.mixture is not None for run in spec.runs)
    mixture = stacked and stack.models.experts != "modules"
    if setup.kbit_floats and setup.autocast and mixture:
        yield (
            f"model: {stack.label} casts experts to fp32 beside quantised matrices and runs them under autocast, which is not "
            "modelled; use lora over bf16"
        )
    if setup.autocast and setup.config.parallel.engine == "fsdp1" and spec.final_norm.kind == "layer":
        other = f"weights in {narrow}" if stack.sharded_units == "lightning" else "engine: torch (FSDP2)"
        yield (
            f"parallel.engine: fsdp1 runs {spec.name}'s layer norms by autocast, in fp32 beside what is gathered in 16 bits, "
            f"which is not modelled; use {other}"
        )


def _unfollowed_parts(model: Model, setup: TrainingSetup) -> Iterator[str]:
    """Yield the same of a model's family and of its parts."""
    stack, spec = setup.stack, model.spec
    yield from encoder_refusals(spec, setup.config, stack, autocast=setup.autocast, unpads=setup.runs_flash_attn)
    yield from cached_refusals(setup.config, integers=setup.formats["hidden_matrix"].product == "integers")
    if spec.unsaid_words and stack.model_code == "own":
        yield f"model: {spec.name} has layers that attend to images, of which {stack.label} has no code; use stack: transformers"
    if setup.has_value_head and (spec.tower is not None or any(not tensor.used for tensor in model.inventory)):
        yield (
            f"method.stage: reward: TRL's head of values asks for a hidden_size, which the config of {spec.name}, with a vision "
            "tower, has not (trl/models/modeling_value_head.py, 0.24.0); use a text model"
        )
    if spec.tower is not None and setup.config.method.embedding is not None:
        yield f"model: embeddings of {spec.name}, which has a vision tower, are not modelled; use a text model"
    if spec.tower is None and setup.config.images.per_row:
        yield f"images: {spec.name} has no vision tower, or {stack.label} runs the text model alone"
    shards = setup.config.parallel.zero_stage and setup.config.parallel.engine == "torch"
    if stack.sharded_units == "own-root" and shards and not spec.tie_word_embeddings:
        yield (
            f"model: {stack.label} shards {spec.name}'s embedding, which its head is not tied to, as a unit below the layers, "
            "which is not modelled; tied models are, and others under LLaMA-Factory's Trainer (--stack llama-factory)"
        )
    if spec.learned_positions and stack.rotary_tables.rows == "batch":
        yield (
            f"model: {stack.label} says the positions of every row, for which {spec.name}'s learned ones are looked up row by "
            "row, which is not modelled; use --stack llama-factory"
        )
    families, family = stack.models.families, spec.architecture
    if family in stack.models.window_masks and setup.attention_choice != "eager":
        yield (
            f"kernels.attention: {stack.label} gives other attention of family {family} than eager a mask of floats, which is not "
            "modelled; use eager, as transformers asks for to train these models"
        )
    if families and family not in families:
        yield f"stack: models of family {family} are not modelled for {stack.label}; {', '.join(families)} are"


def _refuse_experts(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Refuse mixtures of experts that are divided, or multiplied, in another way than is modelled."""
    # Source: ``GroupedExperts.forward`` in torchtitan/models/common/moe.py, whose products are in bf16 always;
    # ``apply_fsdp_to_decoder`` in distributed/fsdp.py (0.3.0), which shards experts that are fewer than ranks by their
    # width.
    counts = [part.num_experts for run in spec.runs if isinstance(part := run.layer.feed_forward, MixtureOfExperts)]
    config, where = setup.config, f"{setup.name}: model: experts of {spec.name}"
    if not counts:
        return
    if config.parallel.tensor > 1 and config.parallel.expert == 1:
        raise CannotAnswerError(
            f"{where} over tensor parallelism are not modelled; use shards (parallel.data), or share experts too (parallel.expert)"
        )
    if config.compute_dtype != "bf16":
        raise CannotAnswerError(
            f"{where} run in bf16, whatever else does, which is not modelled; use compute_dtype: bf16"
        )
    widths = {
        part.intermediate_size for run in spec.runs if isinstance(part := run.layer.feed_forward, MixtureOfExperts)
    }
    odd = next((width for width in (spec.hidden_size, *widths) if width % GROUPED_ROW_ELEMENTS), 0)
    if config.parallel.expert > 1 and odd:
        raise CannotAnswerError(
            f"{where} have rows of {odd} elements, no multiple of {GROUPED_ROW_ELEMENTS}, whose gradients are copied as they are stored, "
            "which is not modelled where GPUs share experts (parallel.expert)"
        )
    if config.parallel.zero_stage and config.parallel.expert == 1 and config.parallel.data > min(counts):
        raise CannotAnswerError(
            f"{where} are {min(counts)}, and more GPUs share each by its width, which is not modelled; use at most as many GPUs"
        )


def _refuse_modules(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Refuse experts that are modules where their loop runs in a way that nobody has followed."""
    if not any(isinstance(run.layer.feed_forward, MixtureOfExperts) for run in spec.runs):
        return
    where, parallel = (
        f"{setup.name}: model: experts of {spec.name}, modules of their own under {setup.stack.label},",
        setup.config.parallel,
    )
    if parallel.gpus > 1 or parallel.zero_stage or setup.offloads_weights:
        raise CannotAnswerError(f"{where} over several GPUs or in host memory are not modelled; use one GPU")
    heads = spec.runs[0].layer.attention
    whole = isinstance(heads, Attention) and heads.query_size == spec.hidden_size
    if spec.architecture == "mixtral" and setup.stack.models.attended == "repeated-views" and not whole:
        raise CannotAnswerError(
            f"{where} have heads that divide hidden_size, whatever head_dim says, before 4.48; leave that out"
        )
    if setup.profile.activation != "composite" or setup.config.compile != "none":
        raise CannotAnswerError(
            f"{where} in fused kernels or compiled are not modelled; leave out kernels.activation and compile"
        )


def _with_tower(model: Model, setup: TrainingSetup) -> Model:
    """Return a vision-language model as a stack trains it: whole, or its text model alone."""
    if setup.stack.model_code != "transformers":
        return noted(text_model(model), f"{setup.stack.label} {TEXT_ALONE}")
    return with_tower(model, setup)


def as_trained(model: Model, setup: TrainingSetup) -> Model:
    """Return what a stack has of a vision-language model: all of it, or the text model alone."""
    return model if setup.stack.model_code == "transformers" else text_model(model)


def text_model(model: Model) -> Model:
    """Return the text model of a vision-language model, as it stands alone."""
    spec = text_spec(model.spec)
    return model if spec is model.spec else replace(model, spec=spec, inventory=inventory_of(spec))


def text_spec(spec: ModelSpec) -> ModelSpec:
    """Return the shapes of the text model of a vision-language model, as it stands alone."""
    if spec.tower is None:
        return spec
    alone = [next((f"model.{n.removeprefix(text)}" for text in TEXTS if n.startswith(text)), n) for n in spec.names]
    return replace(spec, architecture=spec.tower.text_family, names=type(spec.names)(*alone), tower=None)


def _scoring(model: Model, spec: ModelSpec, setup: TrainingSetup) -> Model:
    """Return a model whose head yields scores for each token."""
    # Source: ``GenericForSequenceClassification`` in transformers/modeling_layers.py (5.23.0).
    if not around(spec.architecture).scored:
        raise CannotAnswerError(
            f"{setup.name}: method.stage: {setup.config.method.stage}: transformers has no head of scores for {spec.architecture} "
            "(AutoModelForSequenceClassification); use another model"
        )
    spec = replace(spec, tie_word_embeddings=False, head_bias=False, final_logit_softcap=0.0, logit_scale=0.0)
    if (encoder := spec.encoder) is not None:
        names = spec.names._replace(pooler=encoder.scorer.dense, head=encoder.scorer.head)
        spec = replace(spec, head_bias=True, names=names, encoder=replace(encoder, reads_pooled=True))
    inventory = [
        replace(t, shape=(setup.score_count, *t.shape[1:])) if t.name.startswith(f"{spec.names.head}.") else t
        for t in inventory_of(spec)
    ]
    return replace(model, spec=spec, inventory=tuple(inventory))


@lru_cache(maxsize=1024)
def _built_spec(spec: ModelSpec, rules: StackModels) -> ModelSpec:
    """Return a model's shapes as the rules of a stack change them."""
    return replace(
        spec,
        vocab_size=round_up(spec.vocab_size, rules.vocabulary_multiple),
        names=_names(spec, rules),
        tie_word_embeddings=spec.tie_word_embeddings and rules.tied_head == "released",
        runs=_runs(spec, rules),
        window=spec.window if rules.windows == "released" and spec.architecture not in rules.unwindowed else 0,
        dropout=spec.dropout if rules.dropout else 0.0,
    )


def _uncapped(spec: ModelSpec) -> ModelSpec:
    """Return a model's shapes without caps of attention's scores."""
    # Source: ``sdpa_attention_forward`` in transformers/integrations/sdpa_attention.py (4.57.6), which takes no ``softcap``;
    # ``Gemma2PreTrainedModel._supports_sdpa`` in transformers/models/gemma2/modeling_gemma2.py (4.57.6, 5.23.0).
    return replace(spec, runs=tuple([replace(run, layer=_uncapped_layer(run.layer)) for run in spec.runs]))


def _uncapped_layer(layer: Layer) -> Layer:
    part = layer.attention
    return replace(layer, attention=replace(part, logit_softcap=0.0)) if isinstance(part, Attention) else layer


def _names(spec: ModelSpec, rules: StackModels) -> TensorNames:
    """Return the names of modules, of which Mixtral's experts had others as long as they were modules."""
    if rules.experts != "modules" or spec.architecture != "mixtral":
        return spec.names
    return spec.names._replace(mlp="block_sparse_moe", gate="w1", down="w2", up="w3")


def _runs(spec: ModelSpec, rules: StackModels) -> tuple[LayerRun, ...]:
    """Return the runs of layers, apart where some make masks of a window."""
    runs = tuple([_built_run(run, rules) for run in spec.runs])
    apart = rules.by_groups or rules.windows != "released" or spec.architecture in rules.window_masks
    if not spec.window or not apart:
        return runs
    layers = [run.layer for run in runs for _ in range(run.count)]
    return layer_runs(
        replace(layer, attention=replace(layer.attention, windowed=index not in spec.full_layers))
        if isinstance(layer.attention, Attention)
        else layer
        for index, layer in enumerate(layers)
    )


def _built_run(run: LayerRun, rules: StackModels) -> LayerRun:
    part, mlp = run.layer.attention, run.layer.feed_forward
    fused, layer = rules.fused_qkv != "apart", run.layer
    if rules.fused_qkv != "released" and isinstance(part, Attention) and part.fused_qkv != fused:
        layer = replace(layer, attention=replace(part, fused_qkv=fused))
    if rules.fused_qkv in ("apart", "views") and isinstance(mlp, Mlp) and mlp.fused_gate_up:
        layer = replace(layer, feed_forward=replace(mlp, fused_gate_up=False))
    if rules.experts == "apart" and isinstance(mlp, MixtureOfExperts):
        apart = replace(mlp, fused_gate_up=False, fp32_router=True, fp32_scores=True)
        layer = replace(layer, feed_forward=apart)
    if rules.experts == "modules" and isinstance(mlp, MixtureOfExperts):
        layer = replace(layer, feed_forward=replace(mlp, modules=True, fused_gate_up=False))
    return run if layer == run.layer else replace(run, layer=layer)
