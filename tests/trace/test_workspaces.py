"""Memory inside CUDA's kernels, against their sources worked out by hand."""

from dataclasses import replace

import pytest
import torch

from memplan.catalog.catalog import Catalog, data_directory
from memplan.measure.task import Scale, scaled_model
from memplan.trace.recording.workspaces import LIBRARIES, cublas_workspace_bytes, kernel_workspaces
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("capability", "size"), [("8.0", 8_519_680), ("8.9", 8_519_680), ("9.0", 33_554_432), ("10.0", 33_554_432)]
)
def test_a_cublas_workspace_depends_on_the_architecture(capability, size):
    assert cublas_workspace_bytes(capability) == size


def test_flash_backward_rounds_rows_and_widths_and_expands_grouped_heads():
    query, key = empty(2, 8, 100, 80), empty(2, 2, 100, 80)
    operation = "_scaled_dot_product_flash_attention_backward.default"
    assert kernel_workspaces(operation, (query, query, query)) == [4 * 2 * 8 * 128, 4 * 2 * 128 * 8 * 96]
    assert kernel_workspaces(operation, (query, query, key))[2:] == [2 * 2 * 100 * 8 * 80] * 2


def test_embedding_backward_sorts_long_batches_only():
    operation = "embedding_dense_backward.default"
    short, long = empty(3072, dtype=torch.long), empty(4096, dtype=torch.long)
    assert kernel_workspaces(operation, (empty(3072, 64), short, 1000, -1, False)) == []
    expected = [8 * 4096] * 3 + [8 * 1000] * 2 + [8 * 1409, 4 * 1409 * 64]
    assert kernel_workspaces(operation, (empty(4096, 64), long, 1000, -1, False)) == expected


def test_norms_of_many_tensors_have_a_partial_sum_for_each_chunk_of_the_largest():
    tensors = [empty(65536), empty(65537), empty(3)]
    assert kernel_workspaces("_foreach_norm.Scalar", (tensors, 2.0)) == [4 * 3 * 2]


def test_other_operations_take_nothing_inside():
    assert kernel_workspaces("mm.default", (empty(2, 2), empty(2, 2))) == []


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [
        (1020, 768, 0),
        (1024, 768, 6_291_456),
        (1024, 3072, 25_165_824),
        (1024, 8192, 67_108_864),
        (8192, 2048, 134_217_728),
        (16384, 3072, 138_412_032),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sum_over_many_rows_keeps_partial_sums_as_seen_in_the_memory_history_of_an_h200(rows, columns, size, dtype):
    flat = empty(rows, columns, dtype=dtype)
    expected = [size] if size else []
    assert kernel_workspaces("sum.dim_IntList", (flat, [0], False)) == expected
    if rows % 2 == 0:
        assert kernel_workspaces("sum.dim_IntList", (flat.view(2, -1, columns), [0, 1], True)) == expected


def test_a_sum_along_rows_or_of_what_is_not_contiguous_keeps_nothing():
    assert kernel_workspaces("sum.dim_IntList", (empty(4096, 768), [-1], False)) == []
    assert kernel_workspaces("sum.dim_IntList", (empty(768, 4096).mT, [0], False)) == []


def test_softmax_backward_first_forms_the_product_of_gradient_and_result():
    operation = "_softmax_backward_data.default"
    gradient, result = empty(2, 3, 5), empty(2, 3, 5, dtype=torch.float32)
    assert kernel_workspaces(operation, (gradient, gradient, -1, torch.bfloat16)) == [2 * 30]
    assert kernel_workspaces(operation, (gradient, result, -1, torch.float32)) == [4 * 30]


def traced(name, capability="9.0", **keys):
    catalog = Catalog(data_directory())
    config = replace(catalog.configs["bf16-adamw"], sequence_length=64, **keys)
    model = scaled_model(name, Scale(layers=2, vocab=512), catalog)
    return trace_training(model, resolve(config, catalog, "test"), compute_capability=capability)


@pytest.mark.parametrize(
    ("name", "keys", "lt"),
    [("smollm2-135m", {}, 0), ("qwen2.5-0.5b", {}, 1), ("qwen2.5-0.5b", {"activation_checkpointing": "full"}, 2)],
)
def test_each_thread_that_adds_a_bias_in_a_product_holds_a_workspace_of_cublaslt(name, keys, lt):
    events = [event for event in traced(name, **keys).events if event.operation in LIBRARIES and event.allocates]
    sizes = {library: [e.bytes for e in events if e.operation == library] for library in LIBRARIES}
    assert sizes == {"cublas": [32 * 2**20] * 2, "cublasLt": [2**20] * lt}


def test_a_workspace_is_taken_after_the_first_result():
    events = traced("smollm2-135m").events
    place = next(index for index, event in enumerate(events) if event.operation == "cublas")
    assert events[place - 1].operation == "mm.default"


def test_what_a_kernel_takes_last_it_gives_back_first():
    events = traced("smollm2-135m").events
    inside = [e for e in events if e.operation.startswith("_scaled_dot_product_flash_attention_backward.default (")]
    taken = [e.storage for e in inside if e.allocates][:4]
    assert [e.storage for e in inside if not e.allocates][:4] == taken[::-1]


def test_states_made_with_the_optimizer_are_there_before_the_first_step():
    setup = traced("smollm2-135m", optimizer={"default": "adamw-int8"})
    states = [e for e in setup.events if e.allocates and e.operation == "given"]
    weights = [e.bytes for e in traced("smollm2-135m").events if e.allocates and e.operation == "given"]
    assert len(states) > len(weights)
