"""Orthogonalisation: the in-place versions agree with the textbook, at the bytes that are promised."""

import os
import subprocess
import sys

import pytest
import torch

from memplan.errors import UnknownNameError
from memplan.muon.orthogonalisation.newton_schulz import (
    WORKSPACES,
    gram_segments,
    newton_schulz_,
    newton_schulz_reference,
    newton_schulz_workspace_bytes,
)
from memplan.muon.orthogonalisation.products import HALVED, PLAIN, default_products, halved_product, plain_product
from memplan.muon.orthogonalisation.schedules import KELLER_JORDAN, SCHEDULES, YOU_JIACHENG, resolved_schedule
from memplan.muon.stores.optimizer_errors import OptimizerError

from .memory import LiveStorages

SHAPES = [(64, 64), (96, 300), (300, 96), (50, 51), (1, 7), (3, 64, 80), (2, 80, 64)]
NAMES = sorted(SCHEDULES)


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def gradient_like(rows, columns, decades=3):
    """A matrix whose singular values span ``decades`` decades, as gradients' do."""
    m = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, m))
    right, _ = torch.linalg.qr(torch.randn(columns, m))
    return (left * torch.logspace(0, -decades, m)) @ right.mT


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_workspace_equals_the_textbook_in_fp32(shape, workspace):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    schedule = resolved_schedule("keller-jordan", 5)
    expected = newton_schulz_reference(matrix, schedule, torch.float64)
    actual = newton_schulz_(matrix, schedule, workspace=workspace, chunk_columns=17)
    assert actual is matrix
    assert relative_error(actual, expected) < 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workspace", WORKSPACES)
def test_bf16_error_stays_within_that_of_the_textbook_loop(name, workspace):
    torch.manual_seed(1)
    matrix = gradient_like(128, 512)
    schedule = resolved_schedule(name, 5)
    exact = newton_schulz_reference(matrix, schedule, torch.float64)
    textbook = relative_error(newton_schulz_reference(matrix, schedule, torch.bfloat16), exact)
    ours = relative_error(newton_schulz_(matrix.bfloat16(), schedule, workspace=workspace), exact)
    assert ours <= 1.1 * textbook


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize(("name", "low", "high"), [("keller-jordan", 0.65, 1.25), ("polar-express", 0.7, 1.2)])
def test_singular_values_land_in_the_documented_band(name, low, high, workspace):
    torch.manual_seed(2)
    matrix = newton_schulz_(torch.randn(64, 256).bfloat16(), resolved_schedule(name, 5), workspace=workspace)
    values = torch.linalg.svdvals(matrix.float())
    assert low < values.min() <= values.max() < high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_orthogonalises(dtype):
    torch.manual_seed(3)
    matrix = newton_schulz_(torch.randn(32, 96).to(dtype), resolved_schedule("you-jiacheng", 5))
    assert matrix.dtype == dtype
    assert 0.7 < torch.linalg.svdvals(matrix.float()).mean() < 1.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_workspace_bytes_are_exact(shape, workspace, dtype):
    matrix = torch.randn(shape).to(dtype)
    batch = shape[0] if len(shape) == 3 else 1
    expected = newton_schulz_workspace_bytes(
        *shape[-2:], workspace=workspace, chunk_columns=20, element_bytes=dtype.itemsize, batch=batch
    )
    with LiveStorages([matrix]) as memory:
        newton_schulz_(matrix, resolved_schedule("keller-jordan", 5), workspace=workspace, chunk_columns=20)
    assert memory.extra == expected


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("shape", [(192, 500), (500, 192), (2, 192, 384)], ids=str)
def test_squares_within_a_chunk_are_as_exact_as_the_textbook_loop_in_the_same_bytes(shape, workspace):
    torch.manual_seed(4)
    matrix, schedule = (
        torch.stack([gradient_like(*shape[-2:]) for _ in range(2)]),
        resolved_schedule("keller-jordan", 5),
    )
    matrix = matrix if len(shape) == 3 else matrix[0]
    exact = newton_schulz_reference(matrix, schedule, torch.float64)
    textbook = relative_error(newton_schulz_reference(matrix, schedule, torch.bfloat16), exact)
    ours = matrix.bfloat16()
    with LiveStorages([ours]) as memory:
        newton_schulz_(ours, schedule, workspace=workspace)
    assert relative_error(ours, exact) <= 1.1 * textbook
    assert memory.extra == newton_schulz_workspace_bytes(
        *shape[-2:], workspace=workspace, batch=matrix[..., 0, 0].numel()
    )
    assert newton_schulz_workspace_bytes(*shape[-2:], workspace="min") == newton_schulz_workspace_bytes(*shape[-2:])


def test_workspace_follows_the_published_formulas():
    m, n, c = 1024, 4096, 128
    assert newton_schulz_workspace_bytes(m, n, workspace="min", chunk_columns=c) == 2 * m * m + 4 * m * c
    assert newton_schulz_workspace_bytes(n, m, workspace="fast", chunk_columns=c) == 4 * m * m + 2 * m * c


def test_gram_is_fast_where_the_matrix_is_nearly_square():
    matrix, schedule = torch.randn(64, 100).bfloat16(), resolved_schedule("keller-jordan", 5)
    as_gram = newton_schulz_(matrix.clone(), schedule, workspace="gram")
    assert torch.equal(as_gram, newton_schulz_(matrix.clone(), schedule, workspace="fast"))


def test_a_zero_matrix_stays_zero():
    assert not newton_schulz_(torch.zeros(8, 16), resolved_schedule("keller-jordan", 5)).any()


def test_two_runs_are_bitwise_equal():
    matrix = torch.randn(48, 96).bfloat16()
    schedule = resolved_schedule("polar-express", 5)
    assert torch.equal(newton_schulz_(matrix.clone(), schedule), newton_schulz_(matrix.clone(), schedule))


def test_the_last_triple_is_repeated():
    assert resolved_schedule("you-jiacheng", 7) == (*YOU_JIACHENG, YOU_JIACHENG[-1], YOU_JIACHENG[-1])
    assert resolved_schedule((1.5, -0.5, 0.0), 2) == ((1.5, -0.5, 0.0),) * 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 5, 10])
def test_gram_segments_cover_the_schedule(name, steps):
    schedule = resolved_schedule(name, steps)
    segments = gram_segments(schedule)
    assert sum(segments, ()) == schedule
    assert all(segments)


@pytest.mark.parametrize("bad", [(1.0, 2.0), [(1.0, 2.0)], [], [1.0, (1.0, 2.0, 3.0)]], ids=str)
def test_malformed_coefficients_are_refused(bad):
    with pytest.raises(OptimizerError, match="ns_coefficients"):
        resolved_schedule(bad, 5)


def test_unknown_names_and_bad_shapes_are_refused():
    schedule = resolved_schedule("cubic", 1)
    with pytest.raises(UnknownNameError, match="polar-express"):
        resolved_schedule("polar", 5)
    with pytest.raises(OptimizerError, match="ns_steps"):
        resolved_schedule("cubic", 0)
    with pytest.raises(UnknownNameError, match="Newton-Schulz workspace"):
        newton_schulz_(torch.zeros(2, 2), schedule, workspace="small")
    with pytest.raises(OptimizerError, match="dimensions"):
        newton_schulz_(torch.zeros(4), schedule)


def test_the_notes_orthogonality_errors_are_reproduced():
    """512 x 512, You Jiacheng's schedule: 0.968 .695 .570 .276 .145 after 1 to 5 iterations."""
    torch.manual_seed(0)
    matrix, size = torch.randn(512, 512), 512
    for steps, printed in enumerate((0.968, 0.695, 0.570, 0.276, 0.145), start=1):
        x = newton_schulz_(matrix.clone(), resolved_schedule("you-jiacheng", steps))
        error = ((x @ x.mT - torch.eye(size)).norm() / size**0.5).item()
        assert error == pytest.approx(printed, abs=0.01)


INTERPRETED = """
import torch
from memplan.muon.orthogonalisation.products import plain_product
from memplan.muon.orthogonalisation.triton_kernels import launch

torch.manual_seed(0)
for shape in ((96, 160), (2, 70, 50), (64, 64)):
    left = torch.randn(shape).half()
    for addend, beta in ((left @ left.mT, 0.5), (None, 0.0)):
        plain, fast = torch.empty(2, *(left @ left.mT).shape, dtype=torch.float16)
        plain_product(left, left.mT, plain, addend, beta, 2.0)
        launch(left, left.mT, fast, addend, beta, 2.0, tile=32, tile_inner=16)
        assert torch.equal(fast, fast.mT), shape
        assert (fast - plain).float().norm() < 1e-4 * plain.float().norm(), shape
"""


def test_the_triton_kernel_is_the_plain_product_where_triton_interprets_it_without_a_gpu():
    """In fp16: Triton's interpreter has no products of bf16. It is slow, hence small tiles."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, timeout=300)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(512, 1024), (2, 384, 400), (300, 300), (4096, 4096)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_triton_agrees_with_the_plain_product(shape, transposed):
    from memplan.muon.orthogonalisation.triton_kernels import launch

    left = torch.randn(shape, device="cuda").bfloat16()
    left = left.mT.contiguous().mT if transposed else left
    addend = left @ left.mT
    for given in (addend, None):
        plain, fast = torch.empty_like(addend), torch.empty_like(addend)
        plain_product(left, left.mT, plain, given, 0.5, 2.0)
        launch(left, left.mT, fast, given, 0.5, 2.0)
        assert torch.equal(fast, fast.mT)
        assert ((fast - plain).float().norm() / plain.float().norm()).item() < 5e-3


@pytest.mark.parametrize("shape", [(64, 96), (2, 70, 50), (3, 3), (1, 5), (129, 64), (515, 8)], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["addend", "none"])
def test_a_halved_product_is_the_plain_one_and_allocates_nothing(shape, given):
    torch.manual_seed(0)
    left = torch.randn(shape)
    addend = left @ left.mT if given else None
    plain, half = torch.empty(2, *(left @ left.mT).shape)
    plain_product(left, left.mT, plain, addend, 0.5, 2.0)
    with LiveStorages([left, half, *([addend] if given else [])]) as memory:
        halved_product(left, left.mT, half, addend, 0.5, 2.0)
    torch.testing.assert_close(half, plain)
    assert memory.extra == 0


def test_which_products_are_taken_follows_device_and_size():
    assert default_products(torch.empty(384, 2048)) is HALVED
    assert default_products(torch.empty(383, 2048)) is PLAIN
    assert default_products(torch.empty(8192, 8192, device="meta")) is PLAIN


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
@pytest.mark.parametrize("shape", [(24, 48), (48, 24), (3, 24, 24)])
def test_the_result_lies_in_the_given_matrix_whether_or_not_a_chunk_holds_all_columns(steps, shape):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts, place = whole.clone(), whole.data_ptr()
    assert newton_schulz_(whole, KELLER_JORDAN * steps).data_ptr() == place
    newton_schulz_(parts, KELLER_JORDAN * steps, chunk_columns=16)
    assert torch.allclose(whole, parts, atol=1e-5)
