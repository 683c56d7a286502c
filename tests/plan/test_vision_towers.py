"""Vision-language models trained on rows of text: what a tower that no row passes through costs, and what is refused."""

from dataclasses import replace

import pytest

from memplan.catalog.config_keys.method_keys import Images, Method
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Offload, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.lookup.model_lookup import catalog_model
from memplan.model.inventory import parameter_count
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.axes import full_space
from memplan.solver.search.best_first import Search
from memplan.step.alive_around_layers import handed_back
from memplan.step.instants import step_on_tape
from memplan.step.regimes import regime_of
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.training.adapters import adapter_tensors
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
TOWER = 676_550_144
"""Parameters of Qwen2.5-VL-7B that are not those of Qwen2.5-7B: tower and projector."""
LORA = TrainingConfig("test", stack="trl", adapter=Adapter(rank=8))
COMPOSITE = Kernels(adapters="composite")
EIGHT_BIT = {"default": "bf16", "hidden_matrix": "llm-int8"}
FULL = TrainingConfig("test", stack="transformers")
ADAMW = {"default": "adamw-fp32"}
IMAGE = Images(per_row=1, height=280, width=280)
FOUR_BIT = {"default": "bf16", "hidden_matrix": "nf4-dq"}


def compiled(config, model="qwen2.5-vl-7b"):
    return CompiledPlan(catalog_model(model, CATALOG), resolve(config, CATALOG, "test"))


def test_the_tower_is_stored_and_has_neither_gradients_nor_optimizer_states():
    whole, text = compiled(FULL).states, compiled(FULL, "qwen2.5-7b").states
    assert whole.weight_bytes - text.weight_bytes == 2 * TOWER
    assert (whole.gradient_bytes, whole.state_bytes) == (text.gradient_bytes, text.state_bytes)
    assert any("rows hold text alone" in note for note in compiled(FULL).model.notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fit",), ("Rows hold text alone", "runs the text model alone")),
        (("fit", "--config", "qlora"), ("Rows hold text alone",)),
        (("fit", "--config", "bf16-adamw", "--stack", "bundled"), ("the text model alone",)),
        (("fit", "--method", "inference"), ("prompts hold text alone",)),
        (("compare", "--config", "qlora"), ("Rows hold text alone",)),
    ],
    ids=lambda part: " ".join(part),
)
def test_every_screen_says_that_there_are_no_images(cli, arguments, words):
    command, *options = arguments
    out = " ".join(cli(command, "qwen2.5-vl-3b", "--gpu", "h100", *options).out.split())
    assert all(word in out for word in words)


def test_a_file_that_bounds_its_images_is_told_that_they_are_not_counted(cli, tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct\nimage_max_pixels: 262144\nstage: sft\ndo_train: true\n"
        "finetuning_type: lora\nlora_target: all\ntemplate: qwen2_vl\ndataset: mllm_demo\noutput_dir: out\nbf16: true\n"
    )
    ran = cli("fit", file, "--gpu", "h100")
    words = (
        "Note: Rows hold text alone: rows with images, here of up to 262,144 pixels each, need more; images.per_row and"
    )
    assert words in " ".join(ran.out.split())
    full = " ".join(cli("fit", file, "--gpu", "h100", "--verbose").out.split())
    assert full.count("rows hold text alone") == 1
    assert "an image of its own" in full
    seen = cli("fit", file, "--gpu", "h100", "--set", "images.per_row=1", "--verbose")
    assert "1 of 252 x 1036 pixels, 333 of its 2,048 tokens" in " ".join(seen.out.split())


@pytest.mark.parametrize(
    ("card", "given", "words"),
    [
        ("h100", "images.pixels=500", "no token of 500 pixels (images.pixels); the least is 784"),
        ("t4", "images.pixels=100000", "use compute_dtype: fp16, or rows of text"),
    ],
)
def test_images_that_cannot_be_are_refused_with_what_can(cli, card, given, words):
    job = ("qwen2.5-vl-3b", "--gpu", card, "--config", "qlora", "--set", "images.per_row=1", "--set", given)
    ran = cli("fit", *job)
    assert ran.exit_code in (2, 3)
    assert words in ran.err


def test_other_stacks_train_the_text_model_alone():
    plan = compiled(TrainingConfig("test"))
    assert plan.states.weight_bytes == compiled(TrainingConfig("test"), "qwen2.5-7b").states.weight_bytes
    assert plan.model.spec.architecture == "qwen2"
    assert any("left out" in note for note in plan.model.notes)


def test_adapters_on_the_tower_are_weights_and_are_not_trained():
    everywhere, language = compiled(LORA), compiled(replace(LORA, adapter=replace(LORA.adapter, vision=False)))
    blocks = 32 * (8 * (1280 + 3840) + 8 * (1280 + 1280) + 3 * 8 * (1280 + 3420))
    merger = 8 * (5120 + 5120) + 8 * (5120 + 3584)
    width = 4 if everywhere.setup.adapter_dtype == "fp32" else 2
    assert everywhere.states.weight_bytes - language.states.weight_bytes == width * (blocks + merger)
    assert everywhere.states.gradient_bytes == language.states.gradient_bytes


def test_a_frozen_tower_stays_in_the_dtype_that_it_was_loaded_in():
    upcast = replace(FULL, weights={"default": "fp32"}, optimizer={"default": "adamw-fp32"})
    theirs = compiled(replace(upcast, stack="llama-factory")).states.weight_bytes
    assert compiled(upcast).states.weight_bytes - theirs == 2 * TOWER


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(LORA, stack="axolotl"), "lora_qkv_kernel: false"),
        (replace(LORA, stack="axolotl", kernels=COMPOSITE, weights=EIGHT_BIT), "LLM.int8"),
        (replace(FULL, parallel=Parallel(data=8)), "without gradients"),
        (replace(FULL, parallel=Parallel(data=8), images=Images(tower="frozen")), "without gradients"),
        (replace(LORA, parallel=Parallel(data=8)), "adapter.vision: false"),
        (replace(LORA, parallel=Parallel(data=8, zero_stage=3), images=IMAGE), "images: not modelled on several GPUs"),
        (replace(FULL, parallel=Parallel(data=8, zero_stage=3, engine="fsdp1")), "sharding it so .* FSDP2 is"),
        (
            replace(FULL, stack="llama-factory-v1", parallel=Parallel(data=8, zero_stage=3)),
            "sharding it so .* replicas are",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(config, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        compiled(config)


def sharded(model, config=FULL, **changes):
    parallel = Parallel(data=8, zero_stage=3, **changes)
    return compiled(replace(config, parallel=parallel), model)


def test_a_tower_whose_layers_alone_are_named_is_gathered_with_the_root():
    def gathered(**changes):
        plan = sharded("qwen2.5-vl-7b", **changes)
        instant = max(plan.evaluate(H100).instants, key=lambda pair: pair[0] == "forward")
        return plan, instant[1]

    units, apart = gathered()
    named, together = gathered(tower_blocks=False)
    blocks = sum(t.elements * t.count for t in units.model.inventory if "visual.blocks" in t.name)
    assert together - apart == pytest.approx(2 * blocks, rel=1e-3)  # rows are padded to ranks
    assert named.states == units.states
    assert "gathered with the root" in "".join(named.model.notes)


def test_gemma_3_has_its_tower_in_the_root_and_says_what_a_file_has_to_name():
    default, named = (sharded("gemma-3-4b", tower_blocks=told) for told in (None, False))
    assert default.evaluate(H100).requested_bytes == named.evaluate(H100).requested_bytes
    assert "accelerate stops at gemma3" in "".join(default.model.notes)
    assert "accelerate stops" not in "".join(named.model.notes)
    assert (
        sharded("gemma-3-4b", tower_blocks=True).evaluate(H100).requested_bytes < named.evaluate(H100).requested_bytes
    )


def test_shards_of_an_idle_tower_have_no_gradients_and_deepspeed_steps_it():
    wide = replace(FULL, weights={"default": "fp32"}, optimizer=ADAMW)
    shards, whole = sharded("qwen2.5-vl-7b", wide).states, compiled(wide).states
    assert 8 * shards.gradient_bytes == whole.gradient_bytes
    assert 8 * shards.weight_bytes == pytest.approx(whole.weight_bytes, rel=1e-3)
    bf16 = replace(FULL, master_weights="fp32", optimizer={"default": "adamw-fp32"})
    engine, frozen = (
        sharded("qwen2.5-vl-7b", replace(bf16, stack=stack), engine="deepspeed").states
        for stack in ("trl", "llama-factory")
    )
    pieces = TOWER // 8
    for name, width in (("gradient_bytes", 2), ("master_bytes", 4), ("state_bytes", 8)):
        assert getattr(engine, name) - getattr(frozen, name) == pytest.approx(width * pieces, rel=1e-4)
    assert engine.weight_bytes == frozen.weight_bytes


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (FULL, 4),  # idle and trained: accelerate casts it too
        (replace(FULL, images=Images(tower="frozen", projector="frozen")), 2),
        (replace(FULL, stack="ms-swift"), 2),
        (replace(FULL, stack="ms-swift", weights={"default": "fp32"}, optimizer=ADAMW), 4),
        (replace(FULL, stack="llama-factory"), 2),
    ],
    ids=["trained", "frozen", "ms-swift", "ms-swift-fp32", "llama-factory"],
)
def test_shards_of_a_frozen_tower_stay_as_they_were_loaded(config, width):
    text = parameter_count(catalog_model("qwen2.5-7b", CATALOG).inventory)
    assert 8 * sharded("qwen2.5-vl-7b", config).states.weight_bytes == pytest.approx(4 * text + width * TOWER, rel=1e-3)


def test_a_rank_of_zero_2_has_whole_zeros_for_its_piece_of_an_idle_tower():
    bf16 = replace(FULL, master_weights="fp32", optimizer=ADAMW)

    def states(stack):
        parallel = Parallel(data=8, zero_stage=2, engine="deepspeed")
        return compiled(replace(bf16, stack=stack, parallel=parallel)).states

    whole, frozen = states("trl"), states("llama-factory")
    assert whole.master_bytes - frozen.master_bytes == pytest.approx(4 * TOWER / 8, rel=1e-4)
    assert whole.weight_bytes == pytest.approx(frozen.weight_bytes)


def test_an_idle_tower_is_not_stepped_in_host_memory_by_stages_1_and_2():
    parallel = Parallel(data=8, zero_stage=2, engine="deepspeed")
    offload = Offload(optimizer_states="cpu")
    config = replace(FULL, master_weights="fp32", optimizer=ADAMW, parallel=parallel, offload=offload)
    with pytest.raises(CannotAnswerError, match="host memory"):
        compiled(config)


def test_ms_swift_leaves_a_tower_out_of_what_it_quantises():
    swift = TrainingConfig("test", stack="ms-swift", adapter=Adapter(rank=8), weights=FOUR_BIT)
    theirs, others = compiled(swift).states, compiled(replace(swift, stack="llama-factory")).states
    stored = [
        sum(e.weight_bytes * e.tensor.count for e in s.tensors if "visual" in e.tensor.name) for s in (theirs, others)
    ]
    assert stored[0] == 2 * TOWER
    assert stored[0] - stored[1] == theirs.weight_bytes - others.weight_bytes > TOWER


def test_a_frozen_tower_is_replicated():
    config = replace(LORA, adapter=replace(LORA.adapter, vision=False), parallel=Parallel(data=8))
    assert compiled(config).states.weight_bytes == compiled(replace(config, parallel=Parallel())).states.weight_bytes


def test_a_search_for_settings_has_what_the_stack_trains():
    config = replace(CATALOG.configs["bf16-adamw"], sequence_length=512)
    space, device = full_space(config, CATALOG, (1,)), Device(CATALOG.gpus["h100-sxm-80gb"], "h100")
    for name, stack, weights in (("bundled", "bundled", 0), ("whole", "trl", 2 * TOWER)):
        own = replace(space, base=replace(config, description=name, stack=stack))
        searches = [
            Search(catalog_model(model, CATALOG), own, device, 512, CATALOG, experimental=False)
            for model in ("qwen2.5-vl-7b", "qwen2.5-7b")
        ]
        whole, text = (parameter_count(search.model.inventory) for search in searches)
        assert 2 * (whole - text) == weights


# -------------------------------------------------------------------- rows with images
IMAGES = Images(per_row=2, height=448, width=672)
SEEN = replace(FULL, images=IMAGES, sequence_length=1024)
H100 = Device(CATALOG.gpus["h100-sxm-80gb"], "h100")


def peak(config, model="qwen2.5-vl-7b"):
    return compiled(config, model).evaluate(H100).requested_bytes


def with_images(**changes):
    return replace(SEEN, images=replace(IMAGES, **changes))


def test_images_are_patches_that_windows_of_attention_keep_together():
    spec = catalog_model("qwen2.5-vl-7b", CATALOG).spec
    grid = spec.tower.shape.grid(448, 672)
    assert (grid.patches, grid.merged, len(grid.windows)) == (32 * 48, 16 * 24, 4 * 6)
    assert set(grid.windows) == {64}
    assert sum(spec.tower.shape.grid(252, 140).windows) == 18 * 10


def test_a_tower_that_images_pass_through_is_trained_but_where_it_is_frozen():
    tower = sum(t.elements * t.count for t in compiled(SEEN).model.inventory if t.name.startswith("model.visual"))
    projector = 2 * 5120 * 5120 - 5120 * (5120 - 3584) + 5120 + 3584 + 1280
    assert tower == TOWER
    trained = compiled(SEEN).states.gradient_bytes
    assert trained - compiled(with_images(tower="frozen")).states.gradient_bytes == 2 * (TOWER - projector)
    frozen = compiled(with_images(tower="frozen", projector="frozen")).states
    assert trained - frozen.gradient_bytes == 2 * TOWER
    assert frozen.weight_bytes == compiled(SEEN).states.weight_bytes


def test_adapters_on_the_tower_are_trained_where_images_pass_through_it():
    config = replace(LORA, images=IMAGES, sequence_length=1024)
    language = replace(config, adapter=replace(LORA.adapter, vision=False))
    added = compiled(config).states.gradient_bytes - compiled(language).states.gradient_bytes
    assert added == compiled(config).states.weight_bytes - compiled(language).states.weight_bytes > 0


def adapted(stack, **changes):
    """Return a config of adapters under a stack on rows with images."""
    return replace(LORA, stack=stack, adapter=replace(LORA.adapter, **changes), images=IMAGES, sequence_length=1024)


def test_trainers_freeze_towers_unless_they_are_told_otherwise():
    theirs = compiled(replace(SEEN, stack="llama-factory", weights={"default": "fp32"}, optimizer=ADAMW)).states
    all_trained = compiled(replace(SEEN, weights={"default": "fp32"}, optimizer=ADAMW)).states
    assert all_trained.gradient_bytes - theirs.gradient_bytes == 4 * TOWER
    assert all_trained.weight_bytes - theirs.weight_bytes == 2 * TOWER
    language = compiled(adapted("trl", vision=False)).states.weight_bytes
    everywhere = compiled(adapted("trl")).states.weight_bytes
    tower, projector = (compiled(adapted("trl", vision=part)).states.weight_bytes for part in ("tower", "projector"))
    assert tower + projector == language + everywhere
    assert language < projector < tower
    for stack in ("llama-factory", "ms-swift"):
        assert (
            compiled(adapted(stack)).states.weight_bytes == compiled(adapted(stack, vision=False)).states.weight_bytes
        )
    named = compiled(adapted("ms-swift", targets=("gate_proj",))).states.weight_bytes
    assert named > compiled(adapted("ms-swift", targets=("gate_proj",), vision=False)).states.weight_bytes


def test_more_images_and_larger_ones_need_more():
    text, one, two = (peak(replace(SEEN, images=images)) for images in (Images(), replace(IMAGES, per_row=1), IMAGES))
    assert text < one < two < peak(replace(with_images(height=672), sequence_length=1024 + 400))
    assert peak(with_images(tower="frozen", projector="frozen")) < two


def test_pixels_are_planned_as_the_image_of_most_tokens():
    shape = catalog_model("qwen2.5-vl-7b", CATALOG).spec.tower.shape
    for pixels in (784, 50_000, 262_144, 1_003_520):
        height, width = shape.sides(None, None, pixels)
        assert 0.9 * pixels < height * width <= pixels or pixels < 60_000
        assert height % 28 == width % 28 == 0
    at_most = replace(SEEN, images=Images(per_row=1, pixels=262_144))
    assert peak(at_most) == peak(replace(SEEN, images=Images(per_row=1, height=252, width=1036)))


POOLED = replace(SEEN, images=Images(per_row=2))


def test_every_image_is_of_one_size_where_its_patches_are_pooled():
    shape = catalog_model("gemma-3-4b", CATALOG).spec.tower.shape
    assert shape.sides(None, None, None) == (896, 896)
    grid = shape.grid(896, 896)
    assert (grid.patches, grid.merged, grid.windows) == (64 * 64, 256, (64 * 64,))
    assert peak(POOLED, "gemma-3-4b") == peak(with_images(height=896, width=896), "gemma-3-4b")
    with pytest.raises(InvalidFileError, match="896 x 896"):
        compiled(with_images(height=448, width=448), "gemma-3-4b")


def test_tokens_of_images_that_attend_jointly_have_each_layer_keep_a_mask():
    plan = compiled(POOLED, "gemma-3-4b").evaluate(H100)
    flash = replace(POOLED, kernels=Kernels(attention="flash"))
    text = compiled(replace(SEEN, images=Images()), "gemma-3-4b").evaluate(H100)
    kept = 34 * 2 * 1024**2
    assert plan.requested_bytes - peak(flash, "gemma-3-4b") > kept
    assert plan.requested_bytes > text.requested_bytes + kept


def test_a_pooled_tower_is_trained_but_where_it_is_frozen():
    tower = sum(
        t.elements * t.count for t in compiled(POOLED, "gemma-3-4b").model.inventory if "language" not in t.name
    )
    trained = compiled(POOLED, "gemma-3-4b").states.gradient_bytes
    still = replace(POOLED, images=replace(POOLED.images, tower="frozen", projector="frozen"))
    assert trained - compiled(still, "gemma-3-4b").states.gradient_bytes == 2 * tower


def test_what_a_tower_hands_on_to_early_layers_waits_until_backward_reaches_its_block():
    plan = compiled(SEEN, "qwen3-vl-8b")
    regime = regime_of(plan.own, plan.setup, 1, SEEN.sequence_length)
    _, taped = step_on_tape(plan.own, plan.setup, plan.states, regime)
    handed = 2 * 4096
    waiting = [
        handed_back(taped.tower, layer).coefficient(Part.ACTIVATIONS, Quantity.IMAGE_TOKENS) for layer in (1, 2, 3, 4)
    ]
    assert waiting == [3 * handed, 2 * handed, handed, 0]


def test_mergers_behind_blocks_are_the_towers_for_llama_factory_and_the_projectors_for_ms_swift():
    def trained(stack):
        config = replace(SEEN, stack=stack, images=replace(SEEN.images, tower="frozen", projector="trained"))
        entries = compiled(config, "qwen3-vl-8b").states.tensors
        return {e.tensor.name.rpartition("merger")[0] for e in entries if e.trainable and "merger" in e.tensor.name}

    assert trained("llama-factory") == {"model.visual."}
    assert trained("ms-swift") == {"model.visual.", "model.visual.deepstack_"}


@pytest.mark.parametrize(
    ("config", "model", "reason"),
    [
        (SEEN, "mistral-small-3.1-24b", "family mistral3"),
        (replace(adapted("transformers@4.57"), activation_checkpointing="full"), "qwen3-vl-8b", "reentrant"),
        (SEEN, "qwen2.5-7b", "has no vision tower"),
        (replace(SEEN, stack="llama-factory-v1"), "qwen2.5-vl-7b", "stack llama-factory-v1"),
        (
            replace(FULL, stack="llama-factory", images=Images(tower="trained")),
            "qwen2.5-vl-7b",
            "say images.per_row: 1",
        ),
        (adapted("llama-factory", vision=True), "qwen2.5-vl-7b", "no linear layers in a projector"),
        (
            replace(adapted("trl"), images=replace(IMAGES, tower="trained")),
            "qwen2.5-vl-7b",
            "trained whole beside adapters",
        ),
        (
            replace(adapted("ms-swift"), weights={"default": "fp32"}, compute_dtype="bf16"),
            "qwen2.5-vl-7b",
            "out of autocast",
        ),
        (replace(SEEN, parallel=Parallel(data=8)), "qwen2.5-vl-7b", "several GPUs"),
        (replace(SEEN, evaluation=True), "qwen2.5-vl-7b", "evaluation"),
        (replace(SEEN, method=Method("dpo"), stack="trl"), "qwen2.5-vl-7b", "dpo"),
        (replace(SEEN, kernels=Kernels(attention="eager")), "qwen2.5-vl-7b", "by eager"),
        (replace(SEEN, kernels=Kernels(norm="in-place")), "qwen2.5-vl-7b", "Liger"),
        (replace(LORA, images=IMAGES, weights=EIGHT_BIT), "qwen2.5-vl-7b", "LLM.int8"),
    ],
)
def test_images_that_are_not_modelled_are_refused_by_name(config, model, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        compiled(config, model)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (Images(per_row=1, height=450, width=448), "448 is"),
        (Images(per_row=3, height=672, width=672), "1,728 tokens"),
        (Images(per_row=1), "height and width"),
        (Images(per_row=1, height=448), "height and width"),
        (Images(height=448, width=448), "images.per_row"),
        (Images(per_row=1, height=448, width=448, pixels=4), "leave it out"),
        (Images(per_row=-1), "from 0 to"),
    ],
)
def test_images_that_cannot_be_are_told(images, reason):
    with pytest.raises(InvalidFileError, match=reason):
        compiled(replace(SEEN, images=images))


def test_layers_that_rows_of_text_skip_are_idle_and_refused_over_shards():
    model = catalog_model("llama-3.2-11b-vision", CATALOG)
    idle = {tensor.name for tensor in model.inventory if not tensor.used}
    assert "model.language_model.layers.3.cross_attn.q_proj.weight" in idle
    assert [(run.first, run.count) for run in model.spec.runs][:2] == [(0, 3), (4, 4)]
    assert sum(run.count for run in model.spec.runs) == 32
    sharded = replace(FULL, parallel=Parallel(data=8, zero_stage=3))
    with pytest.raises(CannotAnswerError, match="layers between others that rows of text skip"):
        compiled(sharded, "llama-3.2-11b-vision")


@pytest.mark.parametrize("model", ["internvl3-8b-hf", "llama-3.2-11b-vision"])
def test_a_parameter_of_one_row_in_a_tower_is_no_projection(model):
    """As InternVL's token for a whole image, and gates of Llama 3.2 Vision's, which axolotl casts by name."""
    config = TrainingConfig("test", stack="axolotl", adapter=Adapter(rank=8), weights=FOUR_BIT)
    tensors = adapter_tensors(catalog_model(model, CATALOG), resolve(config, CATALOG, "test"))
    assert tensors
    assert all(len(tensor.shape) == 2 for tensor in tensors)
