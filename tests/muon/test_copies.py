"""Copies, pickles, checkpoints and moves of an optimizer: training goes on as if nothing had happened."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from memplan.muon import Muon, OptimizerError, split_parameters
from memplan.muon.parameter_state import follow_parameter

from .small_training import FORMS, TOKENS, backward, network, same, train, weights

# ---------------------------------------------------------------- copies and pickles


def pickled(pair):
    return pickle.loads(pickle.dumps(pair))


def saved_whole(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved_whole])
@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("format", [None, "q4-0"])
def test_a_copy_trains_as_the_original_does(format, options, copied):
    model = network(format)
    optimizer = Muon.from_model(model, lr=0.02, rounding="stochastic", seed=3, **options)
    train(model, optimizer)
    twin, other = copied((model, optimizer))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    for pair in ((model, optimizer), (twin, other)):
        train(*pair)
    assert same(model, twin)
    assert other.state_bytes() == optimizer.state_bytes()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_releases_its_own_gradients(copied):
    model = network()
    optimizer = Muon.from_model(model, lr=0.02)
    optimizer.enable_gradient_release()
    twin, other = copied((model, optimizer))
    before = weights(model)
    backward(twin)
    assert all(p.grad is None for p in twin.parameters())
    assert not same(model, twin)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    backward(model)
    assert same(model, twin)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("gradient_format", [None, "bf16"])
@pytest.mark.parametrize("release", [False, True])
def test_a_shallow_copy_shares_everything_and_takes_each_gradient_once(release, gradient_format):
    plain, model = network(), network()
    optimizer = Muon.from_model(model, lr=0.02, gradient_format=gradient_format)
    one = Muon.from_model(plain, lr=0.02, gradient_format=gradient_format)
    if release:
        optimizer.enable_gradient_release()
        one.enable_gradient_release()
    shared = copy.copy(optimizer)
    train(model, shared)
    train(plain, one)
    assert same(model, plain)


def test_a_checkpoint_is_loaded_where_states_were_cleared():
    model, other = network(), network()
    optimizer, fresh = Muon.from_model(model, lr=0.02), Muon.from_model(other, lr=0.02)
    train(model, optimizer)
    fresh.state.clear()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    for pair in ((model, optimizer), (other, fresh)):
        train(*pair)
    assert same(model, other)


def test_a_copy_of_the_optimizer_alone_has_parameters_of_its_own():
    model = network()
    optimizer = Muon.from_model(model)
    alone = copy.deepcopy(optimizer)
    keys = [handle.key for handle, _ in alone.handles()]
    assert not {id(key) for key in keys} & {id(p) for p in model.parameters()}
    assert all(key in alone.state for key in keys)


def test_split_halves_of_a_copied_weight_stay_together():
    model = network(dtype=torch.bfloat16)
    optimizer = Muon.from_model(model, lr=0.02, master="split")
    train(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    for pair in ((model, optimizer), (twin, other)):
        train(*pair)
    assert same(model, twin)
    assert all(handle.mantissa is other.state[handle.key]["mantissa"] for handle, _ in other.handles())


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_distributed_state_dicts_are_set_to_the_bit(form, options):
    model, other = network(), network()
    optimizer, fresh = Muon.from_model(model, lr=0.02, **form), Muon.from_model(other, lr=0.5, **form)
    train(model, optimizer)
    chosen = StateDictOptions(**options)
    ours, states = get_state_dict(model, optimizer, options=chosen)
    set_state_dict(other, fresh, model_state_dict=ours, optim_state_dict=states, options=chosen)
    assert fresh.param_groups[0]["lr"] == 0.02
    for pair in ((model, optimizer), (other, fresh)):
        train(*pair)
    assert same(model, other)


def test_a_distributed_checkpoint_with_parameters_in_another_order_is_put_in_place():
    """Names decide where the state of a parameter belongs, not positions."""
    model, other = network(), network()
    groups = split_parameters(other)
    for group in groups:
        group["params"].reverse()
        group["param_names"].reverse()
    optimizer, fresh = Muon.from_model(model, lr=0.02), Muon(groups, lr=0.02)
    train(model, optimizer)
    set_optimizer_state_dict(other, fresh, optim_state_dict=get_optimizer_state_dict(model, optimizer))
    other.load_state_dict(model.state_dict())
    for pair in ((model, optimizer), (other, fresh)):
        train(*pair)
    assert same(model, other)


@pytest.mark.parametrize("format", [None, "q4-0"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_optimizer_itself_goes_through_distributed_checkpoint(format, tmp_path):
    model, other = network(format), network(format)
    optimizer, fresh = Muon.from_model(model, lr=0.02), Muon.from_model(other, lr=0.5)
    train(model, optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"model": other, "optimizer": fresh}, checkpoint_id=tmp_path, no_dist=True)
    for pair in ((model, optimizer), (other, fresh)):
        train(*pair)
    assert same(model, other)


def test_distributed_state_dicts_of_codes_are_refused_with_what_to_do():
    """torch leaves the state of parameters that need no gradient out."""
    model = network("q4-0")
    optimizer = Muon.from_model(model)
    train(model, optimizer)
    with pytest.raises(OptimizerError, match="save and load the optimizer itself"):
        set_optimizer_state_dict(model, optimizer, optim_state_dict=get_optimizer_state_dict(model, optimizer))


def test_hooks_of_saving_and_loading_run():
    model = network()
    optimizer, calls = Muon.from_model(model, lr=0.02), []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, content: calls.append("after saving") or {**content, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, content: calls.append("before loading") or other(content))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after loading"))

    def other(content):
        groups = [{**group, "lr": 0.7} for group in content["param_groups"]]
        return {**content, "param_groups": groups}

    content = optimizer.state_dict()
    assert content["more"] == 1
    optimizer.load_state_dict(content)
    assert calls == ["before saving", "after saving", "before loading", "after loading"]
    assert {group["lr"] for group in optimizer.param_groups} == {0.7}
    assert {group["lr"] for group in content["param_groups"]} == {0.02}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_state_passes_between_models_of_other_dtypes(dtype):
    model, other = network(), network(dtype=dtype)
    optimizer, fresh = Muon.from_model(model, momentum_format="int8"), Muon.from_model(other, momentum_format="int8")
    train(model, optimizer)
    fresh.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(value, fresh.state[q][key]) for key, value in optimizer.state[p].items())
    train(other, fresh)


def test_a_model_may_change_its_dtype_after_the_optimizer_was_made():
    model = network()
    optimizer = Muon.from_model(model, lr=0.02, momentum_format="int8")
    train(model, optimizer)
    model.to(torch.bfloat16)
    before = weights(model)
    train(model, optimizer)
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("form", [*FORMS, {"master": "split"}], ids=str)
def test_state_follows_parameters_to_another_device(form):
    """The meta device stands for another; the test below moves a model to a real one."""
    p = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    optimizer = Muon([p], **form)
    (handle, group), *_ = optimizer.handles()
    handle.key = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16, device="meta"))
    state = optimizer.state[p]
    follow_parameter(handle, group, state)
    assert {tensor.device.type for key, tensor in state.items() if key != "step"} == {"meta"}
    assert state["step"].device.type == "cpu"
    assert "master" not in form or handle.mantissa is state["mantissa"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("format", [None, "q4-0"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_training_goes_on_where_a_model_is_moved(form, format):
    model = network(format)
    optimizer = Muon.from_model(model, lr=0.02, **form)
    train(model, optimizer)
    model.cuda()
    loss = model(TOKENS.cuda()).float().square().mean()
    loss.backward()
    optimizer.step()
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    moved = network(format)
    other = Muon.from_model(moved, lr=0.02, **form)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(OptimizerError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
