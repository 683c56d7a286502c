"""Vision-language models as stacks train them on rows with images: what of a tower trains, and what is not modelled."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.catalog.config_keys.method_keys import Images
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.families import around
from memplan.model.inventory import ParameterTensor, parameter_count
from memplan.model.model import Model
from memplan.model.spec import ModelSpec
from memplan.model.tower import TEXTS, Tower
from memplan.training.adapters import is_adapted
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.image_rules import UNSAID


def with_tower(model: Model, setup: TrainingSetup) -> Model:
    """Return a vision-language model as a stack trains it on rows of text, or with images.

    Raises:
        CannotAnswerError: Its parameters without gradients are shared out, or its head is another one.
    """
    parallel, images = setup.config.parallel, setup.config.images
    model = _as_called(model, setup.stack)
    passed = "" if images.per_row else " that rows of text do not pass through"
    where = f"{setup.name}: model: {model.spec.name} has a vision tower{passed}:"
    if not images.per_row:
        _refuse_idle_tower(where, setup)
    _refuse_unfollowed_tower(where, model, setup)
    if images.per_row:
        return _with_images(model, setup)
    tower = [tensor for tensor in model.inventory if not tensor.used]
    if parallel.zero_stage and any(tensor.name.startswith(TEXTS) for tensor in tower):
        raise CannotAnswerError(f"{where} layers between others that rows of text skip are not modelled over shards")
    shown = _shows_image(model, setup)
    if shown and _trains_shown(tower, model, setup):
        raise CannotAnswerError(
            f"{where} {setup.stack.label} puts an image of its own into a batch without any, which trains it; say images.per_row: 1, and images.pixels"
        )
    under = {0: "DistributedDataParallel"}.get(parallel.zero_stage)
    if setup.config.offload.optimizer_states == "cpu" and parallel.zero_stage in (1, 2):
        under = "DeepSpeed's stages 1 and 2 that step in host memory"
    if parallel.data > 1 and under and any(_trains_idle(tensor, model, setup) for tensor in tower):
        instead = "; adapter.vision: false leaves it out" if setup.config.adapter else ""
        raise CannotAnswerError(f"{where} trained parameters without gradients are not modelled under {under}{instead}")
    note = (
        f"rows hold text alone: vision tower and projector ({parameter_count(tower):,} parameters) are loaded and unused; rows "
        "with images need more, for patches, the tower's activations and the tokens that images become"
    )
    if plans_images(model.spec, setup.stack):
        note += " (images.per_row: 1 plans them)"
    if shown:
        note += "; an image of its own, of 64 x 64 pixels at most or of the tower's one size, that it puts into a batch without any is not counted"
    if parallel.zero_stage:
        model = replace(model, inventory=tuple(_frozen_where_idle(tensor, model, setup) for tensor in model.inventory))
    return noted(model, note + (_of_units(model.spec, parallel) if parallel.zero_stage else ""))


def _frozen_where_idle(tensor: ParameterTensor, model: Model, setup: TrainingSetup) -> ParameterTensor:
    """Return a tensor that no row passes through as frozen where it is, since DeepSpeed steps the others, and FSDP2 has them in fp32."""
    idle = not tensor.used and not _trains_idle(tensor, model, setup)
    return replace(tensor, frozen=True) if idle and setup.config.adapter is None else tensor


def _of_units(spec: ModelSpec, parallel: Parallel) -> str:
    """Return what a note says of the units that a tower is in."""
    if parallel.engine == "deepspeed":
        return "; DeepSpeed steps what of it trains with gradients of zeros" if parallel.zero_stage == 3 else ""
    if wraps_blocks(spec, parallel):
        return "; its blocks are units that nothing gathers, the rest of it is gathered with the root (parallel.tower_blocks: false where a file names layers alone to be wrapped)"
    text = "; all of it is gathered with the root, as where a file names layers alone to be wrapped"
    if parallel.tower_blocks is None:
        text += f", without which accelerate stops at {spec.architecture}: it looks for classes that the model has not"
    return text


def wraps_blocks(spec: ModelSpec, parallel: Parallel) -> bool | str:
    """Tell whether the blocks of a tower are units of torch's shards, or which part of a block is one.

    Source:
        ``_no_split_modules`` in transformers' modeling files (5.23.0); ``fsdp2_prepare_auto_wrap_policy`` in
        accelerate/utils/fsdp_utils.py (1.15.0).
    """
    return around(spec.architecture).wrapped or False if parallel.tower_blocks is None else parallel.tower_blocks


def is_in_root(tensor: ParameterTensor, tower: Tower | None, *, blocks: bool | str) -> bool:
    """Tell whether a tensor, be it an adapter's, is of no unit but the root: of no layer, and of no block, or part of one, where ``blocks`` are units."""
    if "{}" not in tensor.name or tower is None or tensor.name.startswith(TEXTS):
        return "{}" not in tensor.name
    outside = f".{blocks}." not in tensor.name if isinstance(blocks, str) else "merger" in tensor.name
    return not blocks or outside


def _as_called(model: Model, stack: Stack) -> Model:
    """Return a model whose projector is what a stack calls so."""
    tower, names = model.spec.tower, stack.projectors.get(model.spec.architecture)
    if tower is None or names is None:
        return model
    return replace(model, spec=replace(model.spec, tower=replace(tower, projector=tuple(names))))


def _refuse_unfollowed_tower(where: str, model: Model, setup: TrainingSetup) -> None:
    """Raise for a tower whose way through a stack's own code was not followed."""
    fused = set(setup.profile.fused_adapters) if setup.config.adapter is not None else set()
    if {"qkv", "o"} & fused and model.spec.architecture == "qwen2_5_vl":
        raise CannotAnswerError(
            f"{setup.name}: kernels.adapters: {setup.stack.label} stops at Qwen2.5-VL's attention, which it has no fused functions "
            "for (monkeypatch/lora_kernels.py); use composite, there lora_qkv_kernel: false and lora_o_kernel: false"
        )
    if setup.stack.kbit_floats == "fp32-but-ends" and multiplies_integers(setup):
        raise CannotAnswerError(
            f"{where} LLM.int8 of it, as {setup.stack.label} casts beside it, is not modelled; use nf4"
        )
    adapter, label = setup.config.adapter, setup.stack.label
    if setup.stack.vision == "frozen-as-loaded" and adapter is not None and adapter.vision in (True, "projector"):
        raise CannotAnswerError(
            f"{setup.name}: adapter.vision: {label} finds no linear layers in a projector (model/model_utils/misc.py); use tower or false"
        )
    if (
        runs_ahead(model.spec, setup.config, setup.stack)
        and setup.autocast
        and setup.loaded_float != setup.config.compute_dtype
    ):
        raise CannotAnswerError(
            f"{where} {label} runs it ahead of the forward, out of autocast, which is not modelled for weights in {setup.loaded_float}; "
            f"use weights: {setup.config.compute_dtype}"
        )


def _refuse_idle_tower(where: str, setup: TrainingSetup) -> None:
    """Raise for a tower without images that is sharded as was not read, or has a head of scores behind it."""
    parallel = setup.config.parallel
    accelerated = parallel.engine == "torch" and setup.stack.sharded_units in ("accelerate", "axolotl")
    engine = parallel.engine == "deepspeed"
    if parallel.zero_stage and not (accelerated or engine):
        other = (
            "FSDP2 is (parallel.engine: torch)"
            if parallel.engine == "fsdp1"
            else "replicas are (parallel.zero_stage: 0)"
        )
        raise CannotAnswerError(f"{where} sharding it so is not modelled; {other}")
    if setup.scores:
        raise CannotAnswerError(f"{where} a head of one number behind it is not modelled")


def _shows_image(model: Model, setup: TrainingSetup) -> bool:
    """Tell whether a batch without images gets one of the library's own."""
    # Source: ``MultiModalDataCollatorForSeq2Seq`` in llamafactory/data/collator.py (0.9.5); ``_get_inputs_embeds_hf``
    # in swift/template/base.py (ms-swift 4.6.0).
    ahead = setup.stack.images == "embedded" and around(model.spec.architecture).ahead
    return bool(ahead) or setup.stack.images == "positions"


def _trains_shown(tower: Sequence[ParameterTensor], model: Model, setup: TrainingSetup) -> bool:
    """Tell whether an image trains a tower, or adapters on it."""
    adapter, images = setup.config.adapter, setup.config.images
    if adapter is None:
        return "trained" in (images.tower, images.projector)
    return any(is_adapted(tensor, adapter, model.spec.tower) for tensor in tower)


def _trains_idle(tensor: ParameterTensor, model: Model, setup: TrainingSetup) -> bool:
    """Tell whether a tensor that no row passes through, or an adapter on it, is to be trained."""
    adapter, tower = setup.config.adapter, model.spec.tower
    assert tower is not None
    if adapter is None:
        return setup.stack.vision == "as-language" and not _is_frozen(tensor, tower.projector, setup.config.images)
    return is_adapted(tensor, adapter, model.spec.tower)


def multiplies_integers(setup: TrainingSetup) -> bool:
    """Tell whether hidden matrices are multiplied as integers."""
    return setup.formats["hidden_matrix"].product == "integers"


def _with_images(model: Model, setup: TrainingSetup) -> Model:
    """Return a vision-language model as a stack trains it on rows with images."""
    config, tower = setup.config, model.spec.tower
    assert tower is not None
    where, shape, images = f"{setup.name}: images:", tower.shape, config.images
    if shape is None:
        raise CannotAnswerError(
            f"{where} what images pass through of family {model.spec.architecture} is not modelled; of qwen2_5_vl, qwen3_vl and gemma3 it is"
        )
    for text in _unmodelled_images(model, setup):
        raise CannotAnswerError(f"{where} {text}")
    given = {side for side in (images.height, images.width) if side is not None}
    if shape.image_size is None and not given and images.pixels is None:
        raise InvalidFileError([f"{where} rows with images need {UNSAID} (images.height, images.width, images.pixels)"])
    if shape.image_size is not None and (given - {shape.image_size} or images.pixels is not None):
        size = shape.image_size
        text = f"{model.spec.name}'s processor makes every image {size} x {size} pixels; leave height, width and pixels out"
        raise InvalidFileError([f"{where} {text}"])
    if images.pixels is not None and images.pixels < shape.step**2:
        text = f"an image becomes no token of {images.pixels} pixels (images.pixels); the least is {shape.step**2}"
        raise InvalidFileError([f"{where} {text}"])
    height, width = shape.sides(images.height, images.width, images.pixels)
    if wrong := [side for side in (height, width) if side % shape.step]:
        below = max(shape.step, wrong[0] // shape.step * shape.step)
        text = (
            f"{wrong[0]} is no multiple of {shape.step} pixels, as {model.spec.name}'s processor makes it; {below} is"
        )
        raise InvalidFileError([f"{where} {text}"])
    tokens = shape.grid(height, width).merged * images.per_row
    said = f"{images.per_row} of {height} x {width} pixels"
    if tokens >= config.sequence_length:
        text = f"{said} become {tokens:,} tokens, and a row has {config.sequence_length:,} (sequence_length)"
        raise InvalidFileError([f"{where} {text}"])
    frozen = config.adapter is None
    inventory = tuple(
        tensor
        if tensor.used
        else replace(tensor, used=True, frozen=frozen and _is_frozen(tensor, tower.projector, images))
        for tensor in model.inventory
    )
    note = (
        f"images in each row: {said}, {tokens:,} of its {config.sequence_length:,} tokens; cuDNN's workspace for the patches' "
        "convolution is not counted"
    )
    return noted(replace(model, inventory=inventory), note)


def plans_images(spec: ModelSpec, stack: Stack) -> bool:
    """Tell whether rows with images are planned of a model under a stack."""
    tower = spec.tower
    return tower is not None and tower.shape is not None and stack.images != "none"


def _is_stacked(tower: Tower) -> bool:
    return tower.shape is not None and tower.shape.kind == "stacked"


def runs_ahead(spec: ModelSpec, config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether images pass through the tower ahead of the forward, out of autocast.

    Source:
        ``_post_encode`` of ``Qwen2VLTemplate`` in swift/template/templates/qwen.py, which other families' templates leave as it is;
        ``pre_forward_hook`` in swift/template/base.py (ms-swift 4.6.0).
    """
    shape = None if spec.tower is None else spec.tower.shape
    return shape is not None and shape.kind == "windows" and config.images.per_row > 0 and stack.images == "embedded"


def noted(model: Model, note: str) -> Model:
    """Return a model with a note, once where it was built before, as it is for each card."""
    return replace(model, notes=tuple(dict.fromkeys((*model.notes, note))))


def _is_frozen(tensor: ParameterTensor, projector: tuple[str, ...], images: Images) -> bool:
    """Tell whether a tensor of a tower or its projector is frozen."""
    return (images.projector if tensor.name.startswith(projector) else images.tower) == "frozen"


def _unmodelled_images(model: Model, setup: TrainingSetup) -> Iterator[str]:
    """Yield what of a job with images is not modelled."""
    config, stack, images = setup.config, setup.stack, setup.config.images
    stacked = model.spec.tower is not None and _is_stacked(model.spec.tower)
    adapted = config.adapter is not None and config.adapter.vision in (True, "tower")
    asks = stack.input_gradients == "trained-layers"  # of what each layer is given
    if stacked and adapted and setup.checkpointing != "none" and stack.checkpointing.reentrant and not asks:
        yield (
            "transformers asks for no gradient of what Qwen3-VL's patches become (``_input_embed_layer``), so that no adapter on its "
            "blocks is trained where checkpointing is reentrant; use use_reentrant: false, or adapter.vision: false"
        )
    if stack.images == "none":
        yield f"not modelled for stack {stack.name}; transformers and trl are, say; or plan rows of text (images.per_row: 0)"
    if config.adapter is not None and "trained" in (images.tower, images.projector):
        yield "a tower that is trained whole beside adapters is not modelled; adapter.vision says whether it has adapters"
    if config.parallel.gpus > 1:
        yield "not modelled on several GPUs; plan one (--gpus 1), or rows of text"
    elif replace(config.parallel, unused_parameters=None) != Parallel():
        yield "not modelled with an engine for several GPUs; leave parallel out, or plan rows of text"
    if config.method.stage != "sft":
        yield f"not modelled for method.stage {config.method.stage}; sft is"
    if config.freeze != ALL_TRAIN:
        yield "not modelled with freeze; images.tower and images.projector say what of theirs is frozen"
    if config.evaluation:
        yield "a forward that evaluates is not modelled with images; leave evaluation out"
    if config.compile != "none":
        yield "not modelled for compiled models; use compile: none"
    attention = config.kernels.attention or stack.kernels.attention
    if attention in ("eager", "math", "flex"):
        yield f"attention of patches by {attention} is not modelled; use kernels.attention: auto"
    if multiplies_integers(setup):
        yield "LLM.int8 of a tower that images pass through is not modelled; use nf4"
    if any(getattr(setup.profile, key) == "in-place" for key in ("norm", "rotary", "activation")):
        yield "Liger's kernels in a tower are not modelled; leave them out"
    if config.activation_checkpointing == "selective":
        yield "selective checkpointing of a tower is not modelled; use full or none"
