"""Results that are made anew from shapes are those of the operator itself: the same trace, event by event."""

import pytest
import torch

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.training_config import Adapter
from memplan.trace.recording import repeated_operators
from memplan.trace.recording.repeated_operators import RepeatedOperators
from memplan.trace.tracer import trace_training
from tests.survey.agreement import cut_model

aten = torch.ops.aten
FP32 = {"weights": {"default": "fp32"}, "compute_dtype": "fp32"}
JOBS = {
    "llama": ("llama-3.2-1b", {}),
    "adapters, checkpointed": ("llama-3.2-1b", {"adapter": Adapter("dora"), "activation_checkpointing": "full"}),
    "experts": ("qwen3-30b-a3b", {"optimizer": {"default": "muon"}}),
    "biases, tied": ("gpt2", {"gradient_accumulation_steps": 2, "clip_gradients": True, "dropout": 0.1}),
    "coded": ("llama-3.2-1b", {"weights": {"default": "q4-0"}, "optimizer": {"default": "muon-int8"}}),
    "sharded": ("llama-3.2-1b", {**FP32, "parallel": Parallel(data=2, zero_stage=3)}),
    "replicated": ("llama-3.2-1b", {**FP32, "parallel": Parallel(data=2)}),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_trace_is_that_of_operators_that_all_run(job, catalog, make_setup, monkeypatch):
    name, keys = JOBS[job]
    model, setup = cut_model(name, catalog), make_setup(sequence_length=64, **keys)
    traces, every_one = [], lambda self, func, args, options: func(*args, **options)
    for result in (RepeatedOperators.result, every_one):
        monkeypatch.setattr(RepeatedOperators, "result", result)
        traces.append(trace_training(model, setup, compute_capability="9.0"))
    assert traces[0] == traces[1]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def repeated(func, *args, **options):
    """What an operator returns the second time."""
    operators = RepeatedOperators()
    operators.result(func, args, options)
    return operators.result(func, args, options)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (empty(3, 5), empty(5, 2))),
        (aten.add.Tensor, (empty(3, 1), empty(5, dtype=torch.float64))),
        (aten.clone.default, (empty(3, 5).T,)),
        (aten.native_dropout.default, (empty(3, 5), 0.5, True)),
        (aten._foreach_mul.Scalar, ([empty(3), empty(4, 2)], 2.0)),
        (aten._to_copy.default, (empty(3, 5),)),
    ],
)
def test_new_results_have_the_shapes_of_the_first_and_storages_of_their_own(func, args):
    first, second = func(*args), repeated(func, *args)
    assert type(first) is type(second)
    pairs = [(first, second)] if isinstance(first, torch.Tensor) else list(zip(first, second, strict=True))
    given = {storage.untyped_storage()._cdata for storage in args if isinstance(storage, torch.Tensor)}
    for one, other in pairs:
        assert (one.shape, one.stride(), one.dtype, one.device) == (
            other.shape,
            other.stride(),
            other.dtype,
            other.device,
        )
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert other.untyped_storage()._cdata not in given


def test_what_is_written_in_place_is_returned_itself():
    weight = empty(3, 5)
    assert repeated(aten.add_.Tensor, weight, empty(5)) is weight
    assert repeated(aten._foreach_add_.Scalar, [weight], 1.0) is None


def test_an_argument_that_changes_is_another_call():
    operators, x = RepeatedOperators(), empty(4, 6)
    assert operators.result(aten.sum.dim_IntList, (x, [0]), {}).shape == (6,)
    assert operators.result(aten.sum.dim_IntList, (x, [1]), {}).shape == (4,)
    assert operators.result(aten.sum.dim_IntList, (x, [1], True), {}).shape == (4, 1)
    assert operators.result(aten.arange.start_step, (0.0, 3.0, 1.0), {"device": "meta"}).shape == (3,)
    assert operators.result(aten.arange.start_step, (0.0, 5.0, 1.0), {"device": "meta"}).shape == (5,)
    assert operators.result(aten.to.dtype, (x, torch.bfloat16), {}).dtype == torch.bfloat16


def test_views_share_the_storage_of_what_they_view():
    x = empty(4, 6)
    for func, args in ((aten.view.default, (x, [24])), (aten._unsafe_view.default, (x, [24])), (aten.t.default, (x,))):
        assert repeated(func, *args).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_tensors_with_values_are_computed():
    operators, x = RepeatedOperators(), torch.ones(2)
    for _ in range(2):
        x = operators.result(aten.add.Tensor, (x, x), {})
    assert x.tolist() == [4, 4]


def test_a_tensor_that_changes_its_shape_in_place_is_changed_every_time():
    operators = RepeatedOperators()
    for _ in range(2):
        x = empty(1, 4)
        operators.result(aten.squeeze_.default, (x,), {})
        assert x.shape == (4,)
        operators.result(aten.resize_.default, (x, [8]), {})
        assert x.shape == (8,)


def test_what_traces_share_hangs_on_the_default_dtype_and_leaves_out_what_they_override():
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            results.append(RepeatedOperators().result(aten.mul.Scalar, (empty(3, dtype=torch.long), 2.0), {}).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert results == [torch.float32, torch.float64]
    rows, matrices = empty(4, 8, dtype=torch.bfloat16), empty(2, 8, 16, dtype=torch.bfloat16)
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    known = len(repeated_operators._shared)
    assert repeated(aten._grouped_mm.default, rows, matrices, offsets).shape == (4, 16)
    assert len(repeated_operators._shared) == known
