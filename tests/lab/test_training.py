"""Real training: it learns, it repeats itself to the bit, and holds exactly the bytes that were planned."""

import json

import pytest
import torch

from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.lab.training.loop import (
    LossScale,
    Trainer,
    TrainingOptions,
    even_windows,
    library_text,
    random_windows,
    rate_factor,
    train,
)
from memplan.lab.training.run_bytes import comparisons
from memplan.lab.training.trained_model import fast_products, trained_model
from memplan.lab.training.training_record import thinned, verdict
from memplan.library.lookup import Overrides, find_setup
from memplan.model.readers.given_shapes import model_from_shapes
from memplan.muon.weights.quantised import QuantisedWeight
from tests.jobs import shipped_catalog

pytestmark = pytest.mark.thorough

CATALOG = shipped_catalog()
TINY = {"layers": 2, "hidden": 64, "heads": 2, "intermediate": 96, "vocab": 256}
WIDE = TINY | {"layers": 1, "hidden": 256, "intermediate": 256}
"""Rows of 256 numbers, as formats with blocks of 256 need."""

TRAINABLE = sorted(set(CATALOG.configs) - {"lora", "qlora", "bf16-adamw-8bit"})


@pytest.fixture(scope="module")
def text():
    return library_text()


def setup_of(name, *settings, shapes=TINY):
    model = model_from_shapes(**shapes)
    return model, find_setup(name, Overrides(4, 32, None, settings), CATALOG, model)


def ran(text, name, *settings, steps=3, seed=0, shapes=TINY, **options):
    return train(*setup_of(name, *settings, shapes=shapes), TrainingOptions(steps=steps, **options), text, seed)


FP32 = ("weights.default=fp32", "compute_dtype=fp32")


# ------------------------------------------------------------------ learning
@pytest.mark.parametrize(
    ("name", "settings", "options"),
    [
        ("muon", FP32, {}),
        ("muon", (), {"rounding": "nearest"}),
        ("tier1", (), {"rounding": "stochastic", "momentum_format": "gauss4"}),
        ("tier2", (), {"rounding": "stochastic"}),
    ],
    ids=["fp32", "muon", "tier1-gauss4", "tier2"],
)
@pytest.mark.one_in(2)
def test_a_few_steps_lower_the_loss_and_hold_the_planned_bytes(text, name, settings, options):
    run = ran(text, name, *settings, steps=15, **options)
    assert run.validation_loss < 0.85 * run.first_validation_loss
    assert run.first_validation_loss == pytest.approx(5.55, abs=0.15)  # ln(256), chance
    assert [item.component for item in run.bytes] == ["weights", "gradients", "optimizer_states"]
    assert [item.component for item in run.bytes if not item.equal] == []
    assert run.tokens == 15 * 4 * 32


@pytest.mark.parametrize("name", ["tier1", "muon"])
@pytest.mark.one_in(2)
def test_the_same_seed_gives_the_same_bits(text, name):
    first, second = (ran(text, name, rounding="stochastic") for _ in range(2))
    assert (first.losses, first.validation_loss) == (second.losses, second.validation_loss)
    assert ran(text, name, rounding="stochastic", seed=1).losses != first.losses


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_formed_in_fp32_are_those_of_16_bits_but_for_the_order_of_sums(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((300, 96), (256, 96), (256,)))
    native = torch.nn.functional.linear(x, weight, bias)
    with fast_products("cpu", "fp16"):
        formed = torch.nn.functional.linear(x, weight, bias)
        written = torch.addmm(bias, x, weight.T, out=torch.empty_like(native))
    assert formed.dtype is dtype
    assert torch.equal(formed, written)
    assert (formed != native).float().mean() < 2e-3
    assert torch.allclose(formed, native, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


def test_every_format_starts_from_the_same_numbers():
    models = [trained_model(*setup_of(name), seed=0, device="cpu") for name in ("q4-adam", "bf16-adamw", "fp32-adamw")]
    codes, half, full = ([weight.stored for weight in model.weights] for model in models)
    for coded, lower, exact in zip(codes, half, full, strict=True):
        assert torch.equal(lower, exact.to(lower.dtype))
        if isinstance(coded, QuantisedWeight):
            assert (coded.dequantised() - exact).abs().max() <= exact.abs().max() / 7


def test_a_step_of_rate_zero_changes_no_code(text):
    trainer = Trainer(*setup_of("tier1"), TrainingOptions(steps=1, lr=0.0, adamw_lr=0.0, rounding="nearest"), text, 0)
    before = [weight.tensor.clone() for weight in trainer.trained.weights]
    trainer.step(0)
    after = [weight.tensor for weight in trainer.trained.weights]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# ------------------------------------------------------------------ bytes
def differing(text, name, *settings, shapes=TINY, **options):
    """Return the components whose bytes are not those of the plan, after one step."""
    trainer = Trainer(*setup_of(name, *settings, shapes=shapes), TrainingOptions(steps=1, **options), text, 0)
    trainer.step(0)
    return [item for item in comparisons(trainer.planned, trainer.measured) if not item.equal]


@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:'int2-notes' diverges")
def test_every_config_that_can_be_trained_holds_the_planned_bytes(text, name):
    assert differing(text, name, shapes=WIDE if name.startswith(("iq", "tier3")) else TINY) == []


def test_an_optimizer_is_called_validated_where_training_holds_its_bytes(text):
    """Those that no shipped config takes are trained here in the place of another's."""
    bundled = {name for name, entry in CATALOG.optimizers.entries.items() if entry.bundled}
    assert {name for name, entry in CATALOG.optimizers.entries.items() if entry.validated} == bundled
    trained = {setup_of(name)[1].optimizer_names[role] for name in TRAINABLE for role in ("hidden_matrix", "head")}
    for name in bundled - trained:
        assert name.startswith("muon-")
        assert differing(text, "tier1", f"optimizer.hidden_matrix={name}") == [], name


@pytest.mark.parametrize("momentum", ["bf16", "int8", "int4", "gauss4", "gauss3", "gauss2", "ternary"])
@pytest.mark.one_in(3)
def test_another_format_of_momentum_is_planned_with_its_own_bytes(text, momentum):
    assert differing(text, "tier1", momentum_format=momentum) == []


@pytest.mark.parametrize("settings", [("gradients.lifetime=layer",), ("gradient_accumulation_steps=2",)])
def test_release_and_accumulation_train(text, settings):
    run = ran(text, "tier2", *settings)
    assert all(item.equal for item in run.bytes)
    assert run.losses[-1] < run.losses[0] + 0.1


@pytest.mark.parametrize("name", ["lora", "qlora", "bf16-adamw-8bit"])
def test_what_cannot_be_trained_is_refused(text, name):
    with pytest.raises(CannotAnswerError, match="does not train with"):
        ran(text, name)


@pytest.mark.parametrize(
    ("name", "setting", "why"),
    [
        ("fp16-muon", "gradients.dtype=fp8-e4m3", "a loss scale and gradients in a store"),
        ("bf16-adamw", "weights.embedding=fp32", "wider floats than its matrices"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused_with_the_reason(text, name, setting, why):
    with pytest.raises(CannotAnswerError, match=why):
        ran(text, name, setting)


def test_a_format_that_no_matrix_takes_is_refused_with_widths_that_do(text):
    with pytest.raises(CannotAnswerError, match=r"iq3-xxs, whose blocks of 256 .* --hidden 256"):
        ran(text, "tier3")


def test_a_loss_scale_is_halved_where_gradients_overflow_and_divides_them_elsewhere():
    scale = LossScale()
    assert not scale.divide_([torch.tensor([1.0, float("inf")], dtype=torch.float16)])
    assert scale.factor == 2.0**15
    gradient = torch.tensor([2.0**15], dtype=torch.float16)
    assert scale.divide_([gradient])
    assert gradient.item() == 1.0
    for _ in range(1999):
        assert scale.divide_([])
    assert scale.factor == 2.0**16


def test_fp16_learns_with_a_loss_scale(text):
    run = ran(text, "fp16-adam", steps=15, adamw_lr=0.01)
    assert run.validation_loss < 0.95 * run.first_validation_loss
    assert [item.component for item in run.bytes if not item.equal] == []


def test_momentum_of_a_config_without_muon_is_refused(text):
    with pytest.raises(InvalidFileError, match="does not train matrices by Muon"):
        ran(text, "q4-adam", momentum_format="gauss4")


@pytest.mark.parametrize("options", [{"momentum_format": "gauss5"}, {"matrix_options": {"momentums": 0.9}}])
def test_unknown_options_are_refused(text, options):
    with pytest.raises(MemplanError, match=r"did you mean|unknown"):
        ran(text, "tier1", **options)


def test_a_run_that_diverges_ends_and_says_so(text):
    run = ran(text, "muon", *FP32, steps=20, lr=1e30)
    assert run.validation_loss == float("inf")
    assert len(run.losses) < 20
    assert verdict([run], None) == "diverges"


# ------------------------------------------------------------------ text and schedule
def test_text_is_split_by_file_and_is_the_same_each_time(text):
    assert library_text().digest == text.digest
    assert text.training.numel() > 2**20
    assert text.validation.numel() == 2**18


def test_a_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(CannotAnswerError, match="too few Python sources"):
        library_text(tmp_path)


def test_targets_are_the_inputs_one_byte_later(text):
    inputs, targets = random_windows(text.training, 3, 8, torch.Generator().manual_seed(0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert sum(pair[0].shape[0] for pair in even_windows(text.validation, 10, 4, 8)) == 10


def test_the_rate_rises_and_falls_to_zero():
    factors = [rate_factor(step, 100) for step in range(101)]
    assert factors.index(max(factors)) == 9
    assert factors[100] == pytest.approx(0, abs=1e-12)


def test_curves_are_thinned_to_means():
    assert thinned([1.0, 2.0, 3.0, 4.0, 5.0], 3) == [[2, 1.5], [4, 3.5], [5, 5.0]]


# ------------------------------------------------------------------ the command
SMALL = ("--steps", 2, "--layers", 1, "--hidden", 64, "--heads", 2, "--intermediate", 64, "-b", 2, "-s", 16)


def test_the_command_writes_a_record_that_another_is_compared_with(cli, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    ran = cli("lab", "train", "--config", "tier1", *SMALL, "--seed", 0, "--seed", 1, "--out", first, "--json")
    assert (ran.exit_code, ran.data) == (0, json.loads(first.read_text()))
    assert "2/2, loss" in ran.err
    assert [run["seed"] for run in ran.data["runs"]] == [0, 1]
    cli("lab", "train", "--config", "tier1", *SMALL, "--seed", 1, "--against", first, "--out", second)
    assert json.loads(second.read_text())["gap_percent"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_a_quiet_command_prints_its_last_line_alone(cli):
    ran = cli("lab", "train", "--config", "tier1", *SMALL, "--quiet", "--format", "plain")
    assert (ran.err, ran.out.count("\n")) == ("", 1)
    assert "2 steps" in ran.out


def test_the_command_shows_loss_throughput_and_bytes(cli):
    out = cli("lab", "train", "--config", "muon", *SMALL).out
    assert all(word in out for word in ("tokens/s", "planned", "measured", "optimizer_states"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--config", "tier9"), "did you mean"),
        (("--config", "tier1", "--muon", "momentum"), "expected KEY=VALUE"),
        (("--config", "tier1", "--muon", "momentum=high"), "momentum: expected a number in [0, 1), got 'high'"),
        (("--config", "tier1", "--muon", "moment=0.9"), "did you mean 'momentum'"),
        (("--config", "tier1", "--against", "/nonexistent"), "/nonexistent: no such file"),
        (("--config", "tier1", "--hidden", 40, "--heads", 3), "heads"),
    ],
)
def test_mistakes_are_one_line(refused, options, message):
    assert message in refused("lab", "train", *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(refused):
    assert "no CUDA device" in refused("lab", "train", "--config", "tier1", "--device", "cuda", code=3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_runs_on_cuda(text):
    run = ran(text, "tier1", steps=5, device="cuda", rounding="stochastic")
    assert all(item.equal for item in run.bytes)
