"""The optimizer: torch's own as oracle, determinism, checkpoints, refusals."""

import io

import pytest
import torch
from torch import nn

from memplan.errors import MemplanError, UnknownNameError
from memplan.muon import Muon, OptimizerError
from memplan.muon.byte_model import predict_bytes
from memplan.muon.group_options import muon_options
from memplan.muon.state_codecs.codecs import Stretch, codec_bytes, padded
from memplan.muon.state_codecs.state_formats import MOMENTUM_FORMATS
from memplan.muon.update_rule import muon_update_
from memplan.muon.updates import low_rank
from memplan.muon.updates.steps import rate_ratio

SHAPES = [(32, 32), (24, 70), (70, 24)]
SOUND = [name for name in MOMENTUM_FORMATS if name != "int2-notes"]


def parameter(shape, dtype=torch.float32, seed=0):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def run(optimizer, parameters, steps=4, seed=1, rounded_to=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(rounded_to).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("workspace", ["min", "fast", "gram"])
@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_muon_is_reproduced(shape, adjust, workspace):
    ours, theirs, start = parameter(shape), parameter(shape), parameter(shape)
    arguments = {"lr": 0.02, "weight_decay": 0.05, "adjust_lr_fn": adjust}
    run(Muon([{"params": [ours], "algorithm": "muon"}], ns_workspace=workspace, **arguments), [ours])
    run(torch.optim.Muon([theirs], **arguments), [theirs])
    assert ((ours - theirs).norm() / (theirs - start).norm()).item() < (0.08 if workspace == "gram" else 0.03)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_plain_rule_is_what_a_step_does(shape, adjust, nesterov):
    ours, theirs, start = parameter(shape), parameter(shape).detach(), parameter(shape)
    options = {"lr": 0.02, "weight_decay": 0.05, "momentum": 0.9, "nesterov": nesterov}
    optimizer = Muon([ours], adjust_lr_fn=adjust, ns_dtype="fp32", chunk_elements=100, **options)
    mean, generator = torch.zeros(shape), torch.Generator().manual_seed(1)
    run(optimizer, [ours])
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        muon_update_(theirs, gradient, mean, adjust=adjust, dtype=torch.float32, **options)
    assert torch.allclose(optimizer.state[ours]["momentum_buffer"], mean, atol=1e-6)
    assert (ours - theirs).norm() <= 1e-4 * (start - theirs).norm()


def test_momentum_is_bitwise_that_of_torch():
    ours, theirs = parameter((16, 40)), parameter((16, 40))
    optimizer, oracle = Muon([ours], lr=0.02), torch.optim.Muon([theirs], lr=0.02)
    run(optimizer, [ours])
    run(oracle, [theirs])
    assert torch.equal(optimizer.state[ours]["momentum_buffer"], oracle.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(16, 40), (7,), (5000,), (2, 3, 4)], ids=str)
def test_torch_adamw_is_reproduced(shape):
    ours, theirs = parameter(shape), parameter(shape)
    run(Muon([{"params": [ours], "algorithm": "adamw"}], lr=0.01, weight_decay=0.1, chunk_elements=1000), [ours])
    run(torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1), [theirs])
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_narrow_adamw_stays_near_fp32(name):
    ours, exact, start = parameter((80, 90)), parameter((80, 90)), parameter((80, 90))
    for p, adamw_format in ((ours, name), (exact, "fp32")):
        run(Muon([{"params": [p], "algorithm": "adamw", "adamw_format": adamw_format}], lr=0.01), [p], steps=20)
    assert ((ours - exact).norm() / (exact - start).norm()).item() < 0.05


@pytest.mark.parametrize("name", SOUND)
def test_a_quadratic_converges(name):
    p, goal = parameter((24, 60)), parameter((24, 60), seed=9).detach()
    optimizer = Muon([p], lr=1.0, momentum=0.9, momentum_format=name, weight_decay=0.0)
    for step in range(80):
        optimizer.param_groups[0]["lr"] = 1.0 * (1 - step / 80)
        p.grad = (p - goal).detach()
        optimizer.step()
    assert (p - goal).norm() < (0.7 if name == "gauss2" else 0.2) * goal.norm()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", SOUND)
def test_momentum_never_outgrows_the_gradients(name, rounding):
    """A gradient of one magnitude: with the root mean square as its scale gauss2 grew by 45 % a step."""
    p, sign = parameter((32, 128)), torch.randn(32, 128).sign()
    optimizer = Muon([p], lr=0.0, momentum_format=name, momentum_rounding=rounding)
    for _ in range(100):
        p.grad = 1e-3 * sign
        optimizer.step()
    stored = momentum_of(optimizer, p)
    assert stored.norm() <= 1.001e-3 * sign.norm()
    random_fit = rounding == "stochastic" and name.startswith(("gauss", "ternary"))  # of levels at random: shorter
    assert stored.norm() >= (0.5e-3 if random_fit else 0.96e-3) * sign.norm()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_are_bitwise_equal(dtype, rounding):
    results = []
    for _ in range(2):
        matrix, vector = parameter((30, 50), dtype), parameter((5000,), dtype)
        groups = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}]
        options = {
            "momentum_format": "int4",
            "adamw_format": "int8",
            "rounding": rounding,
            "momentum_rounding": rounding,
        }
        run(Muon(groups, lr=0.01, **options), [matrix, vector])
        results.append((matrix, vector))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_stochastic_rounding_lets_bf16_weights_follow_small_updates():
    moved = {}
    for rounding in ("nearest", "stochastic"):
        p = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = Muon([p], lr=1e-3, weight_decay=0.0, rounding=rounding)
        for _ in range(20):
            p.grad = torch.ones(64, 64, dtype=torch.bfloat16)
            optimizer.step()
        moved[rounding] = (1 - p.float()).mean().item()
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(20 * 1e-3 / 64, rel=0.4)


def test_split_master_weights_are_exactly_fp32():
    split = nn.Parameter(parameter((20, 30)).detach().bfloat16())
    exact = nn.Parameter(split.detach().float())
    optimizer = Muon([split], lr=0.01, master="split", reuse_gradient=False)
    run(optimizer, [split], steps=10, rounded_to=torch.bfloat16)
    run(Muon([exact], lr=0.01, reuse_gradient=False), [exact], steps=10, rounded_to=torch.bfloat16)
    assert torch.equal(split, exact.bfloat16())
    assert optimizer.state[split]["mantissa"].any()


def test_bf16_gradients_hold_the_update_afterwards_unless_asked_not_to():
    for reuse in (True, False):
        p = parameter((16, 16), torch.bfloat16)
        p.grad = torch.randn(16, 16).bfloat16()
        before = p.grad.clone()
        Muon([p], reuse_gradient=reuse).step()
        assert torch.equal(p.grad, before) is not reuse


def test_experts_are_updated_one_by_one_or_together():
    single, stacked, batched = parameter((3, 20, 30)), parameter((3, 20, 30)), parameter((3, 20, 30))
    parts = [nn.Parameter(single[i].detach().clone()) for i in range(3)]
    optimizers = Muon(parts, lr=0.02), Muon([stacked], lr=0.02), Muon([batched], lr=0.02, ns_batch=2)
    grads = torch.randn(3, 20, 30)
    for part, grad in zip(parts, grads, strict=True):
        part.grad = grad.clone()
    stacked.grad, batched.grad = grads.clone(), grads.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.allclose(torch.stack([p.detach() for p in parts]), stacked, atol=1e-4)
    assert torch.allclose(batched, stacked, atol=1e-4)


@pytest.mark.parametrize("name", ["fp32", "int8", "gauss3"])
def test_offload_changes_nothing_but_the_place(name):
    here, there = parameter((30, 50)), parameter((30, 50))
    options = {"lr": 0.02, "momentum_format": name, "chunk_elements": 512}
    run(Muon([here], **options), [here])
    run(Muon([there], offload=True, **options), [there])
    assert torch.equal(here, there)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "split")], ids=str
)
def test_offloaded_moments_change_nothing_but_the_place(name, dtype, master):
    here, there = (nn.Parameter(parameter((75, 90)).to(dtype).detach()) for _ in range(2))
    options = {
        "algorithm": "adamw",
        "adamw_format": name,
        "master": master,
        "rounding": "stochastic",
        "chunk_elements": 1024,
    }
    plain, offloaded = Muon([here], **options), Muon([there], offload=True, **options)
    run(plain, [here])
    run(offloaded, [there])
    assert torch.equal(here, there)
    for key, tensor in plain.state[here].items():
        assert torch.equal(tensor, offloaded.state[there][key]), key


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_checkpoints_pass_between_offloaded_states_and_others(name):
    first, second = parameter((75, 90)), parameter((75, 90))
    options = {"algorithm": "adamw", "adamw_format": name, "chunk_elements": 1024}
    offloaded, plain = Muon([first], offload=True, **options), Muon([second], **options)
    run(offloaded, [first])
    with torch.no_grad():
        second.copy_(first)
    plain.load_state_dict(offloaded.state_dict())
    assert not plain.param_groups[0]["offload"]
    for optimizer, p in ((offloaded, first), (plain, second)):
        run(optimizer, [p])
    assert torch.equal(first, second)
    offloaded.load_state_dict(plain.state_dict())
    assert offloaded.param_groups[0]["offload"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options", [{"algorithm": "adamw"}, {"algorithm": "adamw", "adamw_format": "int8"}, {"momentum_format": "int4"}]
)
def test_offloaded_states_on_a_device_take_two_stretches_however_far_the_host_runs_ahead(options):
    places, peaks = [], []
    for offload in (False, True):
        p = nn.Parameter(parameter((512, 4096)).detach().cuda())
        optimizer = Muon([p], chunk_elements=1 << 14, offload=offload, **options)
        for _ in range(5):
            p.grad = torch.ones_like(p).mul_(0.01)
            optimizer.step()
        p.grad = torch.ones_like(p)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
        places.append(p.detach().cpu())
        predicted = predict_bytes(p.shape, {"chunk_elements": 1 << 14, "offload": offload, **options}, device="cuda")
        states = [value for key, value in optimizer.state[p].items() if key != "step"]
        assert {value.is_pinned() for value in states} == {offload}
        assert sum(value.nbytes for value in states) == predicted.optimizer_states + predicted.host_states
        assert peaks[-1] <= 1.01 * predicted.temporaries + 4096
    assert torch.equal(*places)


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)], ids=str)
def test_projected_gradients_find_a_low_rank_goal(shape):
    torch.manual_seed(0)
    goal = torch.randn(shape[0], 3) @ torch.randn(3, shape[1])
    p = nn.Parameter(torch.zeros(shape))
    optimizer = Muon([p], lr=2.0, weight_decay=0.0, projection_rank=4, projection_interval=10, chunk_elements=300)
    assert optimizer.state[p]["momentum_buffer"].numel() == 4 * max(shape)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 2.0 * (1 - step / 60)
        p.grad = (p - goal).detach()
        optimizer.step()
    assert (p - goal).norm() < 0.25 * goal.norm()


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (33, 50)], ids=str)
def test_a_low_rank_part_keeps_what_few_bits_lose(shape):
    """Momentum with leading directions: int4 with rank 4 in int8 is nearer to fp32 than int4 alone."""
    torch.manual_seed(0)
    strong = 5 * torch.randn(shape[0], 4) @ torch.randn(4, shape[1])
    errors = {}
    for rank in (0, 4):
        p = parameter(shape)
        optimizer = Muon([p], lr=0.0, momentum_format="int4", low_rank=rank, chunk_elements=500)
        exact = torch.zeros(shape)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            grad = strong + torch.randn(shape, generator=generator)
            exact.lerp_(grad, 0.05)
            p.grad = grad.clone()
            optimizer.step()
        errors[rank] = (momentum_of(optimizer, p) - exact).norm() / exact.norm()
    assert errors[4] < 0.5 * errors[0]


def momentum_of(optimizer, p):
    state, options = optimizer.state[p], muon_options(optimizer.param_groups[0])
    codec, count = options.codec, p.numel()
    scratch = codec.scratch(padded(count, codec.block_elements), p.device)
    mean = codec.load(Stretch(state, "momentum_buffer", 0, count), scratch)[:count].view(p.shape).clone()
    if options.low_rank:
        left, right = low_rank._factors(state, p.shape, options.low_rank)
        mean += left @ right.mT
        factors = sum(codec_bytes(low_rank.FACTOR, side * options.low_rank) for side in p.shape)
        assert codec_bytes(codec, count) + factors == optimizer.state_bytes() - 4
    return mean


@pytest.mark.parametrize("form", ["fp8-e4m3", "int8"])
def test_an_8_bit_gram_product_changes_the_update_little(form):
    plain, narrow, start = (parameter((64, 96)) for _ in range(3))
    run(Muon([plain], lr=0.02), [plain])
    run(Muon([narrow], lr=0.02, ns_gram_format=form), [narrow])
    assert (plain - narrow).norm() < 0.2 * (plain - start).norm()


def test_a_group_may_override_any_option():
    a, b = parameter((8, 8)), parameter((8, 8))
    optimizer = Muon([{"params": [a], "momentum_format": "int8"}, {"params": [b]}], lr=0.1)
    assert set(optimizer.state[a]) == {"codes", "scales", "step"}
    assert set(optimizer.state[b]) == {"momentum_buffer", "step"}


def test_learning_rate_schedulers_work():
    p = parameter((8, 8))
    optimizer = Muon([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    run(optimizer, [p], steps=1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_closure_is_evaluated_with_gradients():
    p = parameter((8, 8))
    optimizer = Muon([p])

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert optimizer.state[p]["step"].item() == 1


def test_rate_ratios_are_as_published():
    assert rate_ratio("original", 400, 100) == 2
    assert rate_ratio("original", 100, 400) == 1
    assert rate_ratio("match_rms_adamw", 100, 400) == pytest.approx(4)


# ---------------------------------------------------------------- refusals


def snapshot(optimizer, parameters):
    state = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in parameters]
    return [p.detach().clone() for p in parameters], state


def unchanged(optimizer, parameters, before):
    weights, states = before
    return all(torch.equal(p, w) for p, w in zip(parameters, weights, strict=True)) and all(
        torch.equal(optimizer.state[p][k], v) for p, s in zip(parameters, states, strict=True) for k, v in s.items()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_gradients_that_are_not_finite_change_nothing(bad):
    first, second = parameter((8, 8)), parameter((300,))
    optimizer = Muon([{"params": [first], "momentum_format": "int8"}, {"params": [second], "algorithm": "adamw"}])
    run(optimizer, [first, second])
    before = snapshot(optimizer, [first, second])
    first.grad, second.grad = torch.randn(8, 8), torch.randn(300)
    second.grad[7] = bad
    with pytest.raises(OptimizerError, match=r"group 1.*not finite"):
        optimizer.step()
    assert unchanged(optimizer, [first, second], before)


@pytest.mark.parametrize("shape", [(8,), (), (2, 3, 4, 5)], ids=str)
def test_muon_refuses_what_is_no_matrix(shape):
    with pytest.raises(ValueError, match="'adamw'"):
        Muon([{"params": [parameter(shape)], "algorithm": "muon"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum_format": "int5"}, "momentum format"),
        ({"algoritm": "muon"}, "did you mean 'algorithm'"),
        ({"ns_workspace": "tiny"}, "workspace"),
        ({"ns_coefficients": "kj"}, "schedule"),
        ({"lr": -1.0}, "lr: expected a finite number of at least 0"),
        ({"lr": float("inf")}, "lr: expected a finite number"),
        ({"lr": "fast"}, "lr: expected a finite number"),
        ({"weight_decay": None}, "weight_decay: expected a finite number"),
        ({"momentum": None}, r"momentum: expected a number in \[0, 1\)"),
        ({"betas": 0.9}, "betas: expected two numbers"),
        ({"betas": (0.9,)}, "betas: expected two numbers"),
        ({"nesterov": "no"}, "nesterov: expected True or False"),
        ({"offload": None}, "offload: expected True or False"),
        ({"ns_steps": 2.5}, "ns_steps: expected an integer"),
        ({"seed": 1.5}, "whole seed"),
        ({"check_finite": "no"}, "True or False"),
        ({"momentum": 1.0}, "momentum"),
        ({"block_elements": 100}, "multiple of 8"),
        ({"adamw_format": "int4"}, "adamw_format"),
        ({"rounding": "up"}, "rounding"),
        ({"master": "split"}, "bf16"),
        ({"projection_rank": 99}, "rank 99"),
        ({"ns_batch": 0}, "ns_batch"),
        ({"low_rank": 9}, "rank 9"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(MemplanError, match=message):
        Muon([parameter((8, 8))], **options)


def test_other_objects_and_dtypes_are_refused():
    with pytest.raises(OptimizerError, match="str"):
        Muon([{"params": ["weight"]}])
    with pytest.raises(OptimizerError, match="int64"):
        Muon([torch.zeros(4, 4, dtype=torch.int64)])
    with pytest.raises(OptimizerError, match="contiguous"):
        Muon([nn.Parameter(torch.zeros(4, 8).mT)])
    with pytest.raises(UnknownNameError, match="gradient format"):
        Muon([parameter((4, 4))], gradient_format="fp4")


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = Muon([{"params": [embedding.weight], "algorithm": "adamw"}])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="sparse"):
        optimizer.step()


def test_the_notes_two_bits_come_with_a_warning():
    with pytest.warns(UserWarning, match="diverges"):
        Muon([parameter((8, 8))], momentum_format="int2-notes")


# ---------------------------------------------------------------- checkpoints


def mixed(seed=0, **options):
    matrix, vector, large = parameter((30, 50), seed=seed), parameter((9,), seed=seed), parameter((70, 80), seed=seed)
    groups = [
        {"params": [matrix], "momentum_format": "int4"},
        {"params": [vector, large], "algorithm": "adamw", "adamw_format": "int8"},
    ]
    return Muon(groups, lr=0.01, **options), [matrix, vector, large]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_round_trips_to_the_bit_and_training_goes_on_identically(dtype):
    optimizer, parameters = mixed(rounding="stochastic", momentum_rounding="stochastic")
    run(optimizer, parameters)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weights": [p.detach() for p in parameters]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, copies = mixed(seed=5, rounding="stochastic", momentum_rounding="stochastic")
    other.load_state_dict(saved["optimizer"])
    with torch.no_grad():
        for copy, weight in zip(copies, saved["weights"], strict=True):
            copy.copy_(weight)
    for p, copy in zip(parameters, copies, strict=True):
        for name, tensor in optimizer.state[p].items():
            assert other.state[copy][name].dtype == tensor.dtype
            assert torch.equal(other.state[copy][name], tensor)
    run(optimizer, parameters, seed=3)
    run(other, copies, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(parameters, copies, strict=True))


def test_loading_keeps_hyperparameters_of_the_checkpoint():
    optimizer, _ = mixed()
    optimizer.param_groups[0]["lr"] = 0.123
    other, _ = mixed()
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.123


def foreign_checkpoints():
    good, _ = mixed()
    p = parameter((30, 50))
    yield "another optimizer", torch.optim.SGD([p], lr=0.1).state_dict()
    yield "another format", Muon([p], momentum_format="int8").state_dict()
    yield "no checkpoint", {"weights": 1}
    changed = good.state_dict()
    changed["state"][0] = {**changed["state"][0], "codes": torch.zeros(3, dtype=torch.uint8)}
    yield "another shape", changed
    cast = good.state_dict()
    cast["state"][0] = {**cast["state"][0], "codes": cast["state"][0]["codes"].bfloat16()}
    yield "another dtype", cast
    blocks = good.state_dict()
    blocks["param_groups"][0] = {**blocks["param_groups"][0], "block_elements": 64}
    yield "other blocks", blocks
    missing = good.state_dict()
    del missing["state"][1]
    yield "a parameter is missing", missing


@pytest.mark.parametrize(
    ("name", "checkpoint"), list(foreign_checkpoints()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_foreign_checkpoint_changes_nothing(name, checkpoint):
    optimizer, parameters = mixed()
    run(optimizer, parameters)
    before = snapshot(optimizer, parameters)
    with pytest.raises(OptimizerError, match="checkpoint"):
        optimizer.load_state_dict(checkpoint)
    assert unchanged(optimizer, parameters, before)
