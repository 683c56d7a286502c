"""What cards cannot do is refused with what to use, or planned as torch does it there; attention is what torch takes."""

from dataclasses import replace

import pytest

import memplan
from memplan.catalog.catalog import data_directory
from memplan.catalog.entries import Gpu
from memplan.catalog.hardware.hardware_tables import Capability, capability_of, hardware_tables
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.shipped_tables import TABLES
from memplan.catalog.training_config import Gradients
from memplan.documents.loading import load_document
from memplan.documents.schemas import validate
from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.suggested.suggestions import suggestions
from memplan.step.kernels.card_support import emulated_dtype, on_card

pytestmark = pytest.mark.usefixtures("answered_once")

ROOT = data_directory()
HARDWARE = hardware_tables(ROOT)
CARDS = {
    "t4": "7.5",
    "v100-sxm2-16gb": "7.0",
    "p100-pcie-16gb": "6.0",
    "rtx2080ti": "7.5",
    "rtx3090": "8.6",
    "rtx4090": "8.9",
    "a100-sxm-80gb": "8.0",
    "h100-sxm-80gb": "9.0",
    "b200-sxm-180gb": "10.0",
    "mi300x": None,
    "m3-max-128gb": None,
}
AUTO = Kernels(attention="auto")


def answers(gpu: Gpu, *features: str) -> list[str]:
    return [capability_of(gpu, feature, HARDWARE).answer for feature in features]


def test_the_table_passes_the_strict_schema():
    document = load_document(ROOT / TABLES["capabilities"])
    assert list(document.data) == sorted(document.data)
    rows = {key: validate(Capability, document, row, (key,)) for key, row in document.data.items()}
    assert rows == dict(HARDWARE.capabilities)
    for entry in rows.values():
        assert entry.sources
        assert all(row.text for row in entry.rows if row.answer != "native")


@pytest.mark.parametrize("section", ["formats", "gradients", "optimizers"])
def test_what_entries_need_is_in_the_table(catalog, section):
    needs = {feature for entry in catalog.section(section).entries.values() for feature in entry.needs}
    assert needs
    assert needs <= set(HARDWARE.capabilities)


@pytest.mark.parametrize("gpu", CARDS)
def test_cards_are_known_by_their_compute_capability(catalog, gpu):
    assert catalog.gpus[gpu].compute_capability == CARDS[gpu]


@pytest.mark.parametrize(
    ("gpu", "bf16", "float8", "nf4", "compiled", "fp8_states"),
    [
        ("t4", "emulated", "emulated", "native", "native", "absent"),
        ("v100-sxm2-16gb", "emulated", "emulated", "native", "native", "absent"),
        ("p100-pcie-16gb", "emulated", "emulated", "native", "absent", "absent"),
        ("rtx2080ti", "emulated", "emulated", "native", "native", "absent"),
        ("rtx3090", "native", "emulated", "native", "native", "absent"),
        ("rtx4090", "native", "native", "native", "native", "native"),
        ("a100-sxm-80gb", "native", "emulated", "native", "native", "absent"),
        ("h100-sxm-80gb", "native", "native", "native", "native", "native"),
        ("b200-sxm-180gb", "native", "native", "native", "native", "native"),
        ("mi300x", "native", "native", "native", "native", "native"),
        ("m3-max-128gb", "native", "absent", "emulated", "native", "absent"),
    ],
)
def test_what_cards_can_do(catalog, gpu, bf16, float8, nf4, compiled, fp8_states):
    features = ("bf16", "float8", "bitsandbytes-4bit", "torch-compile", "torchao-fp8-optimizer")
    assert answers(catalog.gpus[gpu], *features) == [bf16, float8, nf4, compiled, fp8_states]


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("lora", {"stack": "transformers", "kernels.loss": "fused-linear"}),
        ("lora", {"stack": "transformers", "kernels.norm": "in-place"}),
        ("lora", {"stack": "axolotl"}),
        ("lora", {"stack": "axolotl", "kernels.adapters": "composite", "kernels.loss": "cut-cross-entropy"}),
        ("bf16-adamw", {"allocator": "expandable"}),
    ],
)
def test_metal_has_neither_tritons_kernels_nor_cudas_allocator(config, overrides):
    def plan(gpu):
        return memplan.plan("llama-3.2-1b", gpu=gpu, config=config, set=overrides)

    with pytest.raises(CannotAnswerError, match="does not run on Apple M3 Max"):
        plan("m3-max-128gb")
    assert plan("h100").verdict == plan("mi300x").verdict == "fits"


def test_trls_fused_head_is_torchs_on_metal():
    notes = plan_by_share("llama-3.2-1b", gpu="m3-max-128gb", config="lora").memory.setup.card_notes
    assert sum("TRL's fused head runs by PyTorch's operators" in note for note in notes) == 1
    assert not any(
        "fused head" in note for note in plan_by_share("gpt2", gpu="h100", config="lora").memory.setup.card_notes
    )


def test_metal_is_not_told_to_set_cudas_allocator():
    answer = memplan.suggest("llama-3.2-1b", gpu="m3-max-128gb", config="lora")
    assert {row.plan.setup.config.allocator for row in answer.search.rows} == {"native"}


def test_metal_has_not_the_allocator_that_a_library_asks_for():
    setup = plan_by_share("gpt2", gpu="m3-max-128gb", config="bf16-adamw", set={"stack": "axolotl"}).memory.setup
    assert setup.reserve_share.allocator == setup.config.allocator == "native"
    assert any("not for Metal's" in note for note in setup.card_notes)


@pytest.mark.parametrize(
    ("gpu", "bf16", "fp16", "fp32"),
    [
        ("t4", "math", "efficient", "efficient"),
        ("v100-sxm2-16gb", "math", "efficient", "efficient"),
        ("p100-pcie-16gb", "math", "efficient", "efficient"),
        ("rtx2080ti", "math", "efficient", "efficient"),
        ("rtx3090", "flash", "flash", "efficient"),
        ("rtx4090", "flash", "flash", "efficient"),
        ("a100-sxm-80gb", "flash", "flash", "efficient"),
        ("h100-sxm-80gb", "cudnn", "cudnn", "efficient"),
        ("b200-sxm-180gb", "cudnn", "cudnn", "efficient"),
        ("mi300x", "flash", "flash", "efficient"),
        ("m3-max-128gb", "math", "math", "math"),
    ],
)
def test_attention_left_to_torch_is_what_it_takes_there(catalog, model, setup_of, gpu, bf16, fp16, fp32):
    known = model("pythia-160m")
    kernels = [
        on_card(
            setup_of(weights={"default": dtype}, compute_dtype=dtype, kernels=AUTO), known, catalog.gpus[gpu]
        ).profile.attention
        for dtype in ("bf16", "fp16", "fp32")
    ]
    assert kernels == [bf16, fp16, fp32]


@pytest.mark.parametrize(
    ("gpu", "dtype", "told"),
    [("t4", "fp16", True), ("t4", "bf16", False), ("h100-sxm-80gb", "fp32", True), ("mi300x", "fp32", False)],
)
def test_the_steps_of_math_that_a_later_torch_does_without_are_told(gpu, dtype, told):
    keys = {"stack": "transformers", "weights.default": dtype, "compute_dtype": dtype}
    plan = plan_by_share("qwen2.5-1.5b", gpu=gpu, config="bf16-adamw", set=keys).memory
    assert any("from 2.14 on" in line for line in plan.assumptions) is told


def test_without_a_card_attention_stays_what_it_was(model, setup_of):
    assert setup_of(kernels=AUTO).profile.attention == "flash"
    assert CompiledPlan(model("gpt2"), setup_of(kernels=AUTO)).setup.profile.attention == "flash"


@pytest.mark.parametrize("gpu", ["rtx3090", "a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "mi300x"])
def test_a_card_that_can_do_everything_changes_nothing(catalog, model, setup_of, gpu):
    setup = setup_of("bf16-adamw")
    assert on_card(setup, model("gpt2"), catalog.gpus[gpu]) is setup


def test_a_card_of_which_only_the_memory_is_known_changes_nothing(model, setup_of):
    setup = setup_of("qlora")
    assert on_card(setup, model("gpt2"), Gpu.of_memory("some card", 2**34, "stated")) is setup


@pytest.mark.parametrize("gpu", ["t4", "v100-sxm2-16gb", "p100-pcie-16gb", "rtx2080ti"])
def test_bf16_where_it_is_emulated_is_planned_with_the_score_matrix_and_said(catalog, model, setup_of, gpu):
    job = CompiledPlan(model("smollm2-135m"), setup_of("bf16-adamw"))
    plan = job.evaluate(Device(catalog.gpus[gpu], gpu))
    fused = job.evaluate(Device(catalog.gpus["rtx3090"], "rtx3090"))
    assert plan.setup.profile.attention == "math"
    assert plan.requested_bytes > fused.requested_bytes
    assert any("bf16 is emulated" in line and "fp16" in line for line in plan.assumptions)
    assert any("attention math" in line and "no flash kernel" in line for line in plan.assumptions)
    assert emulated_dtype(job.setup, catalog.gpus[gpu])


def test_a_plan_on_a_card_equals_one_with_its_kernel_set(catalog, model, setup_of):
    known, card = model("smollm2-135m"), Device(catalog.gpus["t4"], "t4")
    keys = {"weights": {"default": "fp16"}, "compute_dtype": "fp16"}
    chosen = CompiledPlan(known, setup_of(**keys)).evaluate(card)
    given = CompiledPlan(known, setup_of(**keys, kernels=Kernels(attention="efficient"))).evaluate(card)
    assert chosen.setup.profile.attention == "efficient"
    assert (chosen.requested_bytes, chosen.instants) == (given.requested_bytes, given.instants)


def test_gradients_in_8_bits_are_as_large_where_the_card_converts_in_software(catalog, model, setup_of):
    job = CompiledPlan(model("smollm2-135m"), setup_of("tier3"))
    here, there = (job.evaluate(Device(catalog.gpus[name], name)) for name in ("rtx3090", "rtx4090"))
    assert here.requested_bytes == there.requested_bytes
    assert any("8-bit floats run in software" in line for line in here.assumptions)
    assert not any("8-bit floats" in line for line in there.assumptions)


@pytest.mark.parametrize(
    ("gpu", "keys", "words"),
    [
        (
            "m3-max-128gb",
            {"gradients": Gradients("fp8-e4m3"), "optimizer": {"default": "adamw-int8"}},
            "no 8-bit floats",
        ),
        ("m3-max-128gb", {"optimizer": {"default": "adamw-8bit-bnb"}}, "bitsandbytes 0.50 has no 8-bit optimizers"),
        ("rtx3090", {"optimizer": {"default": "adamw-fp8-torchao"}}, "needs compute capability 8.9"),
        ("p100-pcie-16gb", {"optimizer": {"default": "adamw-8bit-torchao"}}, "Triton needs compute capability 7.0"),
        ("t4", {"kernels": Kernels(attention="flash")}, "there is no flash attention"),
        ("v100-sxm2-16gb", {"kernels": Kernels(attention="cudnn")}, "there is no cudnn attention"),
        ("mi300x", {"kernels": Kernels(attention="cudnn")}, "there is no cudnn attention"),
    ],
)
def test_what_does_not_run_is_refused_with_what_to_use(catalog, model, setup_of, gpu, keys, words):
    with pytest.raises(CannotAnswerError, match=words) as caught:
        CompiledPlan(model("gpt2"), setup_of(**keys)).evaluate(Device(catalog.gpus[gpu], gpu))
    assert "use " in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ("fit", "gpt2", "--gpu", "m3-max-128gb", "--config", "tier3"),
        ("fit", "gpt2", "--gpu", "a100", "--config", "bf16-adamw", "--set", "optimizer=adamw-fp8-torchao"),
        ("max", "--gpu", "m3-max-128gb", "--config", "tier3"),
        ("max", "gpt2", "--for", "batch", "--gpu", "m3-max-128gb", "--config", "tier3"),
        ("where", "gpt2", "--gpu", "m3-max-128gb", "--config", "tier3"),
    ],
)
def test_commands_end_with_3_and_one_line(refused, command):
    assert "; use " in refused(*command, code=3)


def test_an_m3_says_what_becomes_of_nf4(cli):
    ran = cli("fit", "gpt2", "--gpu", "m3-max-128gb", "--config", "qlora")
    assert ran.exit_code in (0, 1)
    assert "no kernels of its own for Metal" in " ".join(ran.out.split())


# ------------------------------------------------------------------ answers for a card without bf16
def test_recommend_answers_without_bf16(cli):
    ran = cli("recommend", "--gpu", "t4", "--json")
    assert ran.exit_code == 0
    row = ran.data["rows"][0]
    assert row["established"]["config"] in ("fp16-muon", "fp16-adam", "fp32-adamw")
    assert (row["experimental"], row["newton_schulz"]) == (None, "fp16")


@pytest.mark.parametrize("gpu", ["t4", "v100-sxm2-16gb"])
def test_fit_without_a_config_answers_without_bf16(cli, gpu):
    ran = cli("fit", "smollm2-135m", "--gpu", gpu, "--json")
    assert {row["training"]["compute_dtype"] for row in ran.data["rows"]} <= {"fp16", "fp32"}
    configs = {row["config"] for row in ran.data["rows"]}
    assert {"lora", "qlora", "fp16-adam", "fp32-adamw"} <= configs
    assert any("only emulates bf16" in line for line in ran.data["left_out"])


def test_the_command_that_fit_names_plans_the_same(cli):
    sentence = cli("fit", "smollm2-135m", "--gpu", "t4", "--format", "plain").out.strip().splitlines()[-1]
    command = sentence.partition("In full: memplan ")[2].split()
    named, rows = cli(*command, "--json").data, cli("fit", "smollm2-135m", "--gpu", "t4", "--json").data["rows"]
    (row,) = (row for row in rows if row["config"] == named["config"])
    assert named["training"]["compute_dtype"] == "fp16"
    assert {key: named[key] for key in ("training", "stack")} == {key: row[key] for key in ("training", "stack")}
    assert row["peak"] == named["peak"]
    assert row["peak"]["reserve_by_share"] == ""


def test_suggest_answers_without_bf16(cli):
    ran = cli("suggest", "smollm2-135m", "--gpu", "t4", "--json")
    assert ran.data["rows"]
    assert all(row["training"]["compute_dtype"] != "bf16" for row in ran.data["rows"])


# ------------------------------------------------------------------ suggestions keep what is trained
def suggested(catalog, model, setup_of, name, gpu, config, **changes):
    setup = setup_of(config)
    setup = replace(setup, config=replace(setup.config, **changes))
    plan = CompiledPlan(model(name), setup).evaluate(Device(catalog.gpus[gpu], gpu))
    assert plan.verdict != "fits"
    return suggestions(plan, catalog)


def test_for_adapters_on_4_bits_they_stay_so(catalog, model, setup_of):
    found = suggested(catalog, model, setup_of, "llama-3.1-8b", "rtx3060", "qlora", micro_batch_size=4)
    assert found[0].flips_verdict
    assert not any("adapter" in item.change or "weights" in item.change for item in found)


def test_for_adapters_on_16_bits_they_stay_so_while_something_fits(catalog, model, setup_of):
    found = suggested(catalog, model, setup_of, "llama-3.1-8b", "rtx4090", "lora", micro_batch_size=8)
    assert found[0].flips_verdict
    assert not any("weights" in item.change for item in found)


def test_all_weights_stay_trained_while_something_fits(catalog, model, setup_of):
    found = suggested(catalog, model, setup_of, "llama-3.2-3b", "rtx4090", "bf16-adamw")
    assert found[0].flips_verdict
    assert not any("adapter" in item.change for item in found)
    assert "offload" not in found[0].change
    assert any("offload" in item.change for item in found)


def test_adapters_are_the_last_resort_and_it_is_said(catalog, model, setup_of):
    found = suggested(catalog, model, setup_of, "llama-3.1-8b", "rtx3060", "bf16-adamw")
    first = next(item for item in found if item.flips_verdict)
    assert "adapter.kind=lora" in first.change
    assert "nothing else fits" in first.cost


def test_on_a_card_without_bf16_every_suggestion_is_in_fp16(catalog, model, setup_of):
    found = suggested(catalog, model, setup_of, "llama-3.2-1b", "t4", "bf16-adamw")
    assert found[0].flips_verdict
    assert all("compute_dtype=fp16" in item.change and "loss_scaling=true" in item.change for item in found)


@pytest.mark.parametrize(("config", "quantised"), [("qlora", True), ("lora", False)])
def test_a_search_keeps_the_kind_of_weights_under_adapters(cli, config, quantised):
    rows = cli("suggest", "llama-3.2-1b", "--gpu", "rtx4090", "--config", config, "--json").data["rows"]
    assert rows
    for row in rows:
        assert row["training"]["adapter"]["kind"] == "lora"
        assert (row["training"]["weights"]["hidden_matrix"] not in ("bf16", "fp16", "fp32")) is quantised


def test_a_search_leaves_the_kind_where_nothing_else_fits_and_says_so(cli):
    rows = cli("suggest", "llama-3.1-8b", "--gpu", "rtx4060", "--config", "lora", "--json").data["rows"]
    assert rows
    assert all("with them nothing fits" in row["gives_up"] for row in rows)


@pytest.mark.parametrize("config", ["bf16-adamw", "fp16-adam"])
def test_a_trace_on_a_card_runs_the_kernels_that_are_planned_there(cli, config):
    pytest.importorskip("torch")
    ran = cli("trace", "pythia-160m", "--gpu", "t4", "--config", config, "--set", "sequence_length=64")
    assert "the formula agrees to the byte" in ran.out


def test_weights_whose_gradients_torchs_loss_scale_refuses_are_refused():
    settings = {"compute_dtype": "fp16", "weights.default": "fp16", "loss_scaling": True}
    with pytest.raises(CannotAnswerError, match="unscale FP16 gradients"):
        plan_by_share("llama-3.2-1b", gpu="rtx3090", config="bf16-adamw", stack="transformers", set=settings)
    plan_by_share(
        "llama-3.2-1b",
        gpu="rtx3090",
        config="bf16-adamw",
        stack="transformers",
        set={**settings, "weights.default": "fp32"},
    )


def test_a_search_for_trainer_on_a_card_without_bf16_trains_fp32_weights(cli):
    rows = cli("suggest", "llama-3.2-1b", "--gpu", "t4", "--stack", "transformers", "--json").data["rows"]
    assert rows
    assert all(row["training"]["weights"]["hidden_matrix"] == "fp32" for row in rows)
