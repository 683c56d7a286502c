"""What a user of ``torch.optim`` expects of an optimizer: it works, or is refused in words."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from memplan.errors import UnknownNameError
from memplan.muon import Muon, OptimizerError, QuantisedEmbedding, QuantisedLinear, quantise_
from memplan.muon.group_options import NOT_OFFERED

from .small_training import FORMS, TOKENS, backward, network, same, train, weights

# ---------------------------------------------------------------- compilation, determinism, gradients


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, of .grad
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_compiled_step_is_the_step(form):
    plain, compiled = network(), network()
    one, other = Muon.from_model(plain, lr=0.02, **form), Muon.from_model(compiled, lr=0.02, **form)
    train(plain, one)
    step = torch.compile(other.step, backend="eager")

    @torch.compile(backend="eager")
    def whole():
        backward(compiled)
        other.step()
        other.zero_grad()

    backward(compiled)
    step()
    other.zero_grad()
    whole()
    assert same(plain, compiled)


@pytest.mark.parametrize("format", [None, "q4-0", "q8-0"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_deterministic_algorithms_suffice(form, format):
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            model = network(format)
            train(model, Muon.from_model(model, lr=0.02, rounding="stochastic", **form))
            results.append(model)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(*results)


def gradients(model, optimizer):
    decoded = []
    for handle, _ in optimizer.handles():
        out = torch.empty(handle.shape.numel())
        handle.gradient(False).read_(0, out)
        decoded.append(out)
    return torch.cat(decoded)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_clips_the_gradients_of_coded_weights(foreach):
    model = network("q4-0")
    optimizer = Muon.from_model(model)
    backward(model)
    before = gradients(model, optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
    assert norm.item() == pytest.approx(before.norm().item(), rel=0.01)
    assert gradients(model, optimizer).norm().item() == pytest.approx(1e-3, rel=0.01)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-6)
    assert gradients(model, optimizer).abs().max().item() <= 1e-6


@pytest.mark.parametrize("foreach", [None, False])
def test_torch_clips_no_fp8_gradients_without_a_word(foreach):
    model = network("q4-0")
    optimizer = Muon.from_model(model, gradient_format="fp8-e4m3")
    backward(model)
    gradient = model[1].weight.codes.grad
    assert (gradient.shape, gradient.numel(), gradient.dtype) == ((96, 64), 96 * 64, torch.float8_e4m3fn)
    assert gradient.untyped_storage().nbytes() == 96 * 64
    assert "float8_e4m3fn" in repr(gradient)
    for compute in (torch.Tensor.float, torch.Tensor.norm, torch.clone, lambda tensor: tensor * 2):
        with pytest.raises(OptimizerError, match="stored in FP8 with a scale"):
            compute(gradient)
    with pytest.raises(OptimizerError, match="clip_grad_norm_ of the optimizer"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()
    assert all(handle.gradient(False) is None for handle, _ in optimizer.handles())


@pytest.mark.parametrize("gradient_format", [None, "fp32", "bf16", "fp8-e4m3", "fp8-e5m2"])
@pytest.mark.parametrize("format", [None, "q4-0"])
def test_the_optimizer_clips_gradients_wherever_they_are(format, gradient_format):
    model = network(format)
    optimizer = Muon.from_model(model, gradient_format=gradient_format)
    assert optimizer.clip_grad_norm_(1.0) == 0
    backward(model)
    before = gradients(model, optimizer)
    assert optimizer.clip_grad_norm_(1e-3).item() == pytest.approx(before.norm().item(), rel=1e-5)
    clipped = gradients(model, optimizer)
    assert torch.allclose(clipped, before * (1e-3 / before.norm()), rtol=1e-2, atol=1e-9)
    assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(1e-3, rel=0.01)
    assert torch.equal(gradients(model, optimizer), clipped)


def test_clipping_refuses_what_it_cannot_do():
    model = network()
    optimizer = Muon.from_model(model)
    with pytest.raises(OptimizerError, match="max_norm"):
        optimizer.clip_grad_norm_(-1.0)
    backward(model)
    model[1].weight.grad[0, 0] = float("nan")
    with pytest.raises(OptimizerError, match="not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.enable_gradient_release()
    with pytest.raises(OptimizerError, match="inside backward"):
        optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("format", [None, "q4-0"])
def test_a_gradient_scaler_unscales_every_gradient(format):
    plain, scaled = network(format), network(format)
    one, other = Muon.from_model(plain, lr=0.02), Muon.from_model(scaled, lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    backward(plain)
    one.step()
    scaler.scale(scaled(TOKENS).float().square().mean()).backward()
    scaler.unscale_(other)
    torch.nn.utils.clip_grad_norm_(scaled.parameters(), 1e9)
    scaler.step(other)
    scaler.update()
    assert same(plain, scaled)


def test_a_gradient_scaler_skips_a_step_that_overflows_in_a_coded_weight():
    model = network("q4-0")
    optimizer, before = Muon.from_model(model, lr=0.02), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(TOKENS).float().square().mean()).backward()
    model[1].weight.gradient.codes[3, 4] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_scaled_fp8_gradient_is_refused_by_the_scaler():
    model = network("q4-0")
    optimizer = Muon.from_model(model, gradient_format="fp8-e4m3")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(TOKENS).float().square().mean()).backward()
    with pytest.raises(OptimizerError, match="FP8 with a scale"):
        scaler.step(optimizer)


def test_step_hooks_run():
    model = network()
    optimizer, calls = Muon.from_model(model), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, steps=1)
    assert calls == ["before", "after"]


def test_a_closure_may_be_given():
    model = network()
    optimizer, before = Muon.from_model(model, lr=0.02), weights(model)

    def closure():
        optimizer.zero_grad()
        return backward(model)

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_options_of_torch_that_are_not_offered_are_refused_in_words(name):
    p = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(OptimizerError, match=f"{name}: .*(leave it out|negate the loss|give that)"):
        Muon([p], **{name: True})
    with pytest.raises(OptimizerError, match=name):
        Muon([{"params": [p], name: True}])
    assert name not in Muon([{"params": [p], name: None}], **{name: False}).param_groups[0]


# ---------------------------------------------------------------- rates and groups

SCHEDULES = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.01], total_steps=6),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "linear, then exponential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on_after_a_checkpoint(name, tensor):
    pairs = []
    for _ in range(2):
        model = network()
        optimizer = Muon.from_model(model, lr=torch.tensor(0.02) if tensor else 0.02, adamw={"lr": 3e-3})
        pairs.append((model, optimizer, SCHEDULES[name](optimizer)))
    (model, optimizer, schedule), (other, fresh, resumed) = pairs
    for _ in range(2):
        train(model, optimizer, steps=1)
        schedule.step()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    rates = []
    for model, optimizer, schedule in pairs:
        for _ in range(2):
            train(model, optimizer, steps=1)
            schedule.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
    assert rates[:2] == rates[2:]
    assert same(pairs[0][0], pairs[1][0])


def test_reduce_on_plateau_works():
    model = network()
    optimizer = Muon.from_model(model, lr=0.02)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0):
        train(model, optimizer, steps=1)
        schedule.step(loss)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.002)] * 2


@pytest.mark.parametrize("release", [False, True])
def test_a_group_may_be_added_in_the_middle_of_training(release):
    model = network()
    optimizer = Muon([{"params": [model[1].weight]}], lr=0.02, momentum_format="int8")
    if release:
        optimizer.enable_gradient_release()
    train(model, optimizer)
    optimizer.add_param_group({"params": [model[3].weight], "momentum_format": "bf16", "lr": 0.01})
    before = model[3].weight.detach().clone()
    train(model, optimizer)
    assert not torch.equal(before, model[3].weight)
    assert int(optimizer.state[model[3].weight]["step"]) == 2
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model[3].weight]})


def test_options_may_change_in_the_middle_and_are_checked():
    model = network()
    optimizer = Muon.from_model(model, lr=0.02)
    train(model, optimizer)
    group = optimizer.param_groups[0]
    group.update(momentum=0.5, lr=0.5, rounding="stochastic", ns_workspace="min", chunk_elements=512)
    train(model, optimizer)
    before = weights(model)
    for key, value in {"momentum": 1.5, "lr": -1.0, "ns_steps": 0, "rounding": "up", "ns_workspace": "tiny"}.items():
        sound = group[key]
        group[key] = value
        backward(model)
        with pytest.raises((OptimizerError, UnknownNameError)):
            optimizer.step()
        group[key] = sound
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    optimizer.step()


@pytest.mark.parametrize(
    "change",
    [{"momentum_format": "int8"}, {"algorithm": "adamw"}, {"block_elements": 64}, {"offload": True}, {"low_rank": 2}],
    ids=str,
)
@pytest.mark.parametrize("release", [False, True])
def test_a_state_that_no_longer_fits_its_group_is_refused(change, release):
    model = network()
    optimizer = Muon.from_model(model)
    if release:
        optimizer.enable_gradient_release()
    train(model, optimizer)
    before = model[1].weight.detach().clone()
    optimizer.param_groups[0].update(change)
    with pytest.raises(OptimizerError, match=r"[13]\.weight has a state that was made"):
        train(model, optimizer)
    assert torch.equal(before, model[1].weight)


def test_a_rate_that_is_changed_in_place_is_checked_and_a_deleted_option_refused():
    model = network()
    optimizer = Muon.from_model(model, lr=torch.tensor(0.02))
    train(model, optimizer)
    before = weights(model)
    optimizer.param_groups[0]["lr"].fill_(-1.0)
    with pytest.raises(OptimizerError, match="lr: expected a finite number"):
        train(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.02)
    optimizer.zero_grad()
    del optimizer.param_groups[0]["momentum"]
    with pytest.raises(OptimizerError, match="lost its option 'momentum'"):
        train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_parameter_put_into_a_group_by_hand_is_refused():
    model = network()
    optimizer = Muon([{"params": [model[1].weight]}])
    optimizer.param_groups[0]["params"].append(model[3].weight)
    backward(model)
    with pytest.raises(OptimizerError, match="add_param_group"):
        optimizer.step()


# ---------------------------------------------------------------- models


def test_a_model_is_routed_by_role():
    model = network()
    optimizer = Muon.from_model(model, lr=0.02, adamw={"lr": 3e-4, "weight_decay": 0.0}, momentum_format="int8")
    named = {group["algorithm"]: group["param_names"] for group in optimizer.param_groups}
    assert named == {"muon": ["1.weight", "3.weight"], "adamw": ["0.weight", "1.bias", "2.weight", "2.bias"]}
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.1), (3e-4, 0.0)]
    assert "codes" in optimizer.state[model[1].weight]


def test_wrong_assignments_are_refused():
    for assign, message in {
        ("3.wieght", "muon"): "assign: no parameter is named '3.wieght'; did you mean '3.weight'",
        ("3.weight", "sgd"): "unknown algorithm",
    }.items():
        with pytest.raises((OptimizerError, UnknownNameError), match=message):
            Muon.from_model(network(), assign=dict([assign]))
    with pytest.raises(OptimizerError, match="algorithms by names"):
        Muon.from_model(network(), assign="muon")
    with pytest.raises(OptimizerError, match="expected a module, got generator"):
        Muon.from_model(network().parameters())


@pytest.mark.parametrize("option", ["low_rank", "projection_rank"])
def test_options_of_matrices_leave_vectors_alone(option):
    model = network()
    train(model, Muon.from_model(model, lr=0.02, **{option: 4}))


def test_a_model_that_cannot_be_routed_is_refused_by_name():
    with pytest.raises(OptimizerError, match=r"0\.weight .*Conv2d"):
        Muon.from_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8)))
    with pytest.raises(OptimizerError, match="nothing for Muon"):
        Muon.from_model(nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4)))
    with pytest.raises(OptimizerError, match="nothing for Muon"):
        Muon.from_model(network().requires_grad_(False))
    with pytest.raises(OptimizerError, match=r"1\.weight of shape .*not contiguous"):
        Muon.from_model(nn.Sequential(nn.Embedding(9, 4), transposed(nn.Linear(4, 8))))
    with pytest.raises(OptimizerError, match=r"0\.weight_g .*Linear"), pytest.warns(FutureWarning):
        Muon.from_model(nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)))
    mixed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8))
    assert len(Muon.from_model(mixed, assign={"0.weight": "adamw"}).param_groups) == 2


def transposed(layer):
    layer.weight = nn.Parameter(layer.weight.detach().mT.contiguous().mT)
    return layer


def test_what_shards_cannot_have_is_refused_with_what_to_do(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        p = nn.Parameter(distribute_tensor(torch.zeros(8, 24), mesh, [Shard(0)]))
        with pytest.raises(OptimizerError, match=r"low_rank 4 takes whole matrices"):
            Muon([p], low_rank=4)
        with pytest.raises(OptimizerError, match=r"gradient_format 'bf16' takes whole matrices"):
            Muon([p], gradient_format="bf16")
        with pytest.raises(OptimizerError, match=r"no whole blocks of 16.*block_elements that divide them"):
            Muon([p], momentum_format="int8", block_elements=16)
        with pytest.raises(OptimizerError, match="cannot be released inside backward"):
            Muon([p], momentum_format="int8", block_elements=8).enable_gradient_release()
        with pytest.raises(OptimizerError, match="expected shards"):
            Muon([nn.Parameter(DTensor.from_local(torch.zeros(8, 24), mesh, [Partial()]))])
    finally:
        distributed.destroy_process_group()


def test_parameters_that_an_update_in_fp32_would_round_are_refused():
    with pytest.raises(OptimizerError, match=r"float64: updates are computed in fp32"):
        Muon([nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))])


def test_other_wrapped_tensors_are_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(OptimizerError, match="TwoTensor"):
        Muon([nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)))])


# ---------------------------------------------------------------- quantised models


def test_a_model_is_quantised_by_a_formats_name():
    model = network("q4-0")
    assert [type(layer) for layer in model] == [QuantisedEmbedding, QuantisedLinear, nn.LayerNorm, QuantisedLinear]
    optimizer = Muon.from_model(model, lr=0.02, rounding="stochastic")
    losses = []
    for _ in range(12):
        losses.append(backward(model).item())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(64, 32), nn.Linear(33, 32)), r"1: rows of 33 .*blocks of 32 .*q4-0"),
        (lambda: nn.Sequential(nn.TransformerEncoderLayer(64, 2, 64)), r"0\.self_attn\.out_proj: torch's attention"),
        (lambda: nn.Sequential(nn.Linear(32, 32), nn.Embedding(9, 32, max_norm=1.0)), r"1: an embedding with max_norm"),
        (lambda: nn.Linear(32, 32), "the model itself"),
    ],
)
def test_what_cannot_be_quantised_is_named_and_nothing_has_changed(build, message):
    model = build()
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(OptimizerError, match=message):
        quantise_(model, "q4-0")
    assert [(name, type(module)) for name, module in model.named_modules()] == before


def test_a_wrong_choice_of_format_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'q4-0'"):
        quantise_(network(), "q4_0")
    with pytest.raises(OptimizerError, match="a format's name or a function, got list"):
        quantise_(network(), ["q4-0"])


def test_a_layer_in_two_places_is_replaced_in_both():
    layer = nn.Linear(32, 32)
    model = quantise_(nn.Sequential(layer, nn.ReLU(), layer), "q8-0")
    assert isinstance(model[0], QuantisedLinear)
    assert model[0] is model[2]


def test_the_padding_row_takes_no_gradient():
    layer = quantise_(nn.Sequential(nn.Embedding(9, 32, padding_idx=2)), "q8-0")[0]
    layer(torch.tensor([1, 2, 2])).sum().backward()
    assert layer.weight.codes.grad[1].any()
    assert not layer.weight.codes.grad[2].any()
