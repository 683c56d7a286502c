"""What a user changes around the optimizer between steps: parameters, their memory, torch's defaults, the precision of products."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from memplan.muon import Muon, OptimizerError, split_parameters

from .small_training import FORMS, TOKENS, backward, network, same, train, weights

# ---------------------------------------------------------------- what torch has set for all


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("format", [None, "q4-0"])
@pytest.mark.parametrize("form", [*FORMS, {"momentum_format": "ternary", "rounding": "golden"}], ids=str)
def test_a_default_dtype_changes_nothing(form, format, dtype):
    plain, other = network(format), network(format)
    train(plain, Muon.from_model(plain, lr=0.02, **form))
    torch.set_default_dtype(dtype)
    try:
        optimizer = Muon.from_model(other, lr=0.02, **form)
        train(other, optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(plain, other)
    assert all(state["step"].dtype == torch.float32 for state in optimizer.state.values())


def test_steps_are_counted_on_the_cpu_whatever_the_default_device():
    model = network("q4-0")
    with torch.device("meta"):
        optimizer = Muon.from_model(model, momentum_format="int8")
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


@pytest.mark.parametrize("seed", [20_261_129, 2**63 - 1, 2**64, -1])
@pytest.mark.parametrize("rounding", ["stochastic", "golden"])
def test_any_whole_number_is_a_seed(seed, rounding):
    results = []
    for _ in range(2):
        model = network(dtype=torch.bfloat16)
        train(model, Muon.from_model(model, lr=0.02, rounding=rounding, seed=seed))
        results.append(model)
    assert same(*results)


# ---------------------------------------------------------------- parameters


def test_a_parameter_of_another_dtype_shape_or_order_is_refused_before_anything_changes():
    changes = {
        "float64": lambda weight: weight.double(),
        "not contiguous": lambda weight: torch.zeros(weight.shape[::-1]).mT,
        r"has shape \(48, 64\) now": lambda weight: weight[:48].clone(),
    }
    for message, change in changes.items():
        model = network()
        optimizer = Muon.from_model(model)
        train(model, optimizer, 1)
        changed = model[1].weight
        changed.data = change(changed.data)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = weights(model)
        with pytest.raises(OptimizerError, match=rf"1\.weight .*{message}"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_a_parameter_given_twice_or_in_a_set_is_refused():
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(OptimizerError, match="twice"):
        Muon([weight, weight])
    with pytest.raises(OptimizerError, match="order"):
        Muon([{"params": {weight}}])


@pytest.mark.parametrize("format", [None, "q4-0"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_states_that_were_cleared_begin_anew(form, format):
    first, second = network(format), network(format)
    optimizer = Muon.from_model(first, lr=0.02, **form)
    train(first, optimizer)
    optimizer.state.clear()
    train(first, optimizer, 1)
    train(second, Muon.from_model(second, lr=0.02, **form))
    train(second, Muon.from_model(second, lr=0.02, **form), 1)
    assert same(first, second)


def test_a_split_parameter_begins_anew_too():
    model = network(dtype=torch.bfloat16)
    optimizer = Muon.from_model(model, master="split")
    train(model, optimizer)
    optimizer.state.clear()
    train(model, optimizer)
    assert all("mantissa" in state for state in optimizer.state.values())


@pytest.mark.parametrize("batch_bytes", [0, 1 << 20])
def test_a_parameter_without_a_gradient_in_some_steps_skips_these(batch_bytes):
    model = network()
    optimizer = Muon.from_model(model, lr=0.02, batch_bytes=batch_bytes)
    for step in range(4):
        backward(model)
        if step % 2:
            model[1].weight.grad = None
        before = model[1].weight.detach().clone()
        optimizer.step()
        assert torch.equal(before, model[1].weight) is bool(step % 2)
    assert int(optimizer.state[model[1].weight]["step"]) == 2


@pytest.mark.parametrize(
    "shape", [(), (0,), (3,), (0, 4), (4, 0), (1, 5), (5, 1), (2, 3, 4), (0, 3, 4), (2, 3, 4, 5)], ids=str
)
def test_parameters_of_any_shape_are_updated(shape):
    for form in ({}, {"momentum_format": "ternary", "adamw_format": "int8", "rounding": "golden"}):
        parameter = nn.Parameter(torch.ones(shape))
        algorithm = "muon" if len(shape) in (2, 3) else "adamw"
        optimizer = Muon([{"params": [parameter], "algorithm": algorithm}], lr=0.1, **form)
        for _ in range(2):
            parameter.grad = torch.ones(shape)
            optimizer.step()
        assert parameter.isfinite().all()
        assert not parameter.numel() or bool((parameter < 1).any())


@pytest.mark.parametrize("gradient_format", [None, "fp8-e4m3"])
def test_a_parameter_that_was_frozen_at_first_is_heard_once_it_is_trained(gradient_format):
    model = network()
    model[1].weight.requires_grad_(False)
    optimizer = Muon([{"params": [model[1].weight]}], lr=0.5, gradient_format=gradient_format)
    assert not model[1].weight.requires_grad
    optimizer.enable_gradient_release()
    model[1].weight.requires_grad_(True)
    before = model[1].weight.detach().clone()
    backward(model)
    assert not torch.equal(before, model[1].weight)
    assert model[1].weight.grad is None


def test_states_made_on_meta_begin_anew_where_a_parameter_has_memory():
    parameter = nn.Parameter(torch.zeros(8, 8, device="meta"))
    optimizer = Muon([parameter], lr=0.1, momentum_format="int8")
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros(8, 8)))
    parameter.grad = torch.eye(8)
    optimizer.step()
    assert {tensor.device.type for tensor in optimizer.state[parameter].values()} == {"cpu"}
    assert parameter.detach().any()


def test_an_optimizer_made_in_inference_mode_trains():
    plain, model = network(), network()
    train(plain, Muon.from_model(plain, lr=0.02))
    with torch.inference_mode():
        optimizer = Muon.from_model(model, lr=0.02)
    train(model, optimizer)
    assert same(plain, model)


def test_a_parameter_without_a_shape_is_refused():
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    with pytest.raises(OptimizerError, match=r"0\.weight has no shape yet"):
        Muon.from_model(model)
    with pytest.raises(OptimizerError, match="no shape yet"):
        Muon([model[0].weight])
    model(torch.zeros(2, 8))
    assert len(Muon.from_model(model).param_groups) == 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int8], ids=str)
def test_a_parameter_of_numbers_that_no_update_handles_is_refused(dtype):
    with pytest.raises(OptimizerError, match="expected fp32, bf16 or fp16"):
        Muon([nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)])


def test_split_halves_are_refused_once_the_parameter_is_no_longer_bf16():
    model = network(dtype=torch.bfloat16)
    optimizer = Muon.from_model(model, master="split")
    train(model, optimizer, 1)
    model.float()
    with pytest.raises(OptimizerError, match="other half of bf16"):
        train(model, optimizer, 1)


# ---------------------------------------------------------------- weights that are codes


def freeze_by_attribute(module):
    for parameter in module.parameters():
        parameter.requires_grad = False


@pytest.mark.parametrize("freeze", [lambda module: module.requires_grad_(False), freeze_by_attribute])
def test_a_frozen_layer_of_codes_stays_and_may_be_thawed(freeze):
    model = network("q4-0")
    optimizer = Muon.from_model(model, lr=0.5)
    freeze(model[1])
    before = model[1].weight.codes.clone()
    train(model, optimizer)
    assert torch.equal(before, model[1].weight.codes)
    assert model[1].weight.codes.grad is None
    assert [entry.name for entry in split_parameters(model).report if entry.algorithm == "frozen"] == [
        "1.weight",
        "1.bias",
    ]
    model.requires_grad_(True)
    train(model, optimizer)
    assert not torch.equal(before, model[1].weight.codes)


def test_gradients_are_released_of_a_layer_that_was_frozen_at_first():
    model = network("q4-0")
    model[1].requires_grad_(False)
    optimizer = Muon([{"params": [model[1].weight]}], lr=0.5)
    optimizer.enable_gradient_release()
    model.requires_grad_(True)
    before = model[1].weight.codes.clone()
    backward(model)
    assert not torch.equal(before, model[1].weight.codes)


def test_codes_that_replace_others_are_codes_and_the_optimizer_says_so():
    model, other = network("q4-0"), network("q4-0")
    train(other, Muon.from_model(other, lr=0.02))
    optimizer = Muon.from_model(model, lr=0.02)
    model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    backward(model)
    with pytest.raises(OptimizerError, match="make the optimizer after that"):
        optimizer.step()
    model.zero_grad()
    train(model, Muon.from_model(model, lr=0.5))
    assert not same(model, other)


def test_codes_that_get_memory_later_are_codes():
    trained = network("q4-0")
    with torch.device("meta"):
        model = network("q4-0")
        model[1](torch.zeros(2, 64)).sum().backward()
    model.zero_grad()
    model.to_empty(device="cpu").load_state_dict(trained.state_dict())
    train(model, Muon.from_model(model, lr=0.02))
    train(trained, Muon.from_model(trained, lr=0.02))
    assert same(model, trained)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", [None, "q4-0"])
def test_products_under_autocast_have_its_dtype(format, dtype):
    model = network(format)
    optimizer = Muon.from_model(model, lr=0.02)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            assert model[1](model[0](TOKENS)).dtype == dtype
            loss = model(TOKENS).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool(value.isfinite().all()) for value in weights(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_products_may_be_computed_again(reentrant):
    plain, again = network("q4-0"), network("q4-0")
    backward(plain)
    checkpoint(again[1:], again[0](TOKENS), use_reentrant=reentrant).float().square().mean().backward()
    for model in (plain, again):
        Muon.from_model(model, lr=0.02).step()
    assert same(plain, again)


@pytest.mark.parametrize("change", [
    lambda model: model.to(torch.bfloat16),
    lambda model: model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}),
])  # fmt: skip
def test_codes_stay_codes_where_torch_swaps_tensors(change):
    plain, swapped = network("q4-0"), network("q4-0")
    optimizers = [Muon.from_model(model, lr=0.02) for model in (plain, swapped)]
    for model, optimizer, swaps in ((plain, optimizers[0], False), (swapped, optimizers[1], True)):
        train(model, optimizer, 1)
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        try:
            change(model)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        train(model, optimizer, 1)
    assert same(plain, swapped)


def test_the_gradient_of_an_input_alone_leaves_none_in_codes():
    model = network("q4-0")
    hidden = model[0](TOKENS).detach().requires_grad_()
    torch.autograd.grad(model[1](hidden).sum(), hidden)
    assert model[1].weight.codes.grad is None
    model[1](hidden).sum().backward(inputs=[hidden])
    torch.autograd.grad(model(TOKENS).sum(), model[1].bias)
    assert all(entry.codes.grad is None for entry in (model[0].weight, model[1].weight, model[3].weight))


def test_second_derivatives_are_refused_over_trained_codes_and_right_over_frozen_ones():
    model = network("q4-0")
    x, matrix = torch.randn(3, 64, requires_grad=True), model[1].weight.dequantised()
    with pytest.raises(OptimizerError, match="second derivatives"):
        torch.autograd.grad(model[1](x).square().sum(), x, create_graph=True)
    model[1].weight.requires_grad_(False)
    (slope,) = torch.autograd.grad(model[1](x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert torch.allclose(second, (2 * torch.ones(3, 64) @ matrix.mT) @ matrix, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_follow_the_dtype_of_the_model(dtype):
    model = network("q4-0")
    optimizer = Muon.from_model(model, lr=0.02)
    train(model, optimizer, 1)
    model.to(dtype)
    assert model[0](TOKENS).dtype == dtype
    train(model, optimizer, 1)
    assert "like" not in "".join(model.state_dict())


# ---------------------------------------------------------------- several processes


@contextmanager
def ranks(world):
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("release", [False, True])
def test_gradients_are_not_taken_before_replicas_have_summed_them(release):
    """Backward calls the optimizer's hooks before those of DistributedDataParallel."""
    model = network()
    optimizer = Muon.from_model(model, lr=0.02, gradient_format=None if release else "bf16")
    if release:
        optimizer.enable_gradient_release()
    with ranks(1):
        backward(model)
    before = weights(model)
    with ranks(2), pytest.raises(OptimizerError, match="replicas would part"):
        backward(model)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_replicas_of_codes_are_refused_since_nothing_sums_their_gradients():
    with ranks(2):
        replicated = DistributedDataParallel(network("q4-0"))
        with pytest.raises(OptimizerError, match="replicas would part"):
            replicated(TOKENS)
        replicated.module[0].requires_grad_(False)
        replicated.module[1].weight.requires_grad_(False)
        replicated.module[3].requires_grad_(False)
        replicated(TOKENS)  # as below adapters: nothing is left that ranks would have to sum
    with ranks(1):
        DistributedDataParallel(network("q4-0"))(TOKENS)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_shards_of_codes_are_refused():
    with ranks(2):
        model = fully_shard(network("q4-0"))
        with pytest.raises(OptimizerError, match="cannot be sharded"):
            Muon.from_model(model)
