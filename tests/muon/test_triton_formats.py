"""Kernels of coded weights: in Triton's interpreter every byte and value is that of the plain code."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from memplan.muon import Muon, OptimizerError, quantise_
from memplan.muon.state_codecs.triton_codecs import AVAILABLE
from memplan.muon.weights.triton_formats import in_kernels
from memplan.muon.weights.weight_codecs import WEIGHT_FORMATS, weight_format

FORMATS = ("q8-0", "q4-0", "q5-0", "q5-b64", "q6-b64", "iq3-xxs", "iq2-xxs")
INTERPRETED = """
from tests.muon.test_triton_formats import FORMATS, assert_equal_codes, assert_equal_steps
for name in FORMATS:
    for seed in range(1 if name.startswith("iq") else 3):  # all points of a grid, one after another
        assert_equal_codes(name, seed, "cpu")
assert_equal_steps("q4-0", "cpu")
"""


def values_of(seed: int, elements: int, device: str) -> torch.Tensor:
    """Numbers of every size, blocks of zeros, of one magnitude with both signs, of ties between codes, and too large for fp16."""
    torch.manual_seed(seed)
    values = torch.randn(elements) * torch.logspace(-9, 4, elements // 256).repeat_interleave(256)
    values[:256], values[256:512] = 0.0, 0.37 * (torch.arange(256) % 3 - 1)
    values[512:768] = torch.arange(256) % 17 - 8.0
    values[768:800] = 3e7
    return values.to(device)


def assert_equal_codes(name: str, seed: int, device: str) -> None:
    """Hold fresh codes, codes that keep their scales, and codes with noise against those of the plain code, and all decoded."""
    plain = weight_format(name)
    chosen, elements = in_kernels(plain), 256 * 21
    values = values_of(seed, elements, device)
    moved = values + 0.05 * values_of(seed + 100, elements, device)
    shape = (elements // plain.block_elements, plain.block_bytes)
    results = []
    for own in (plain, chosen):
        codes, out = torch.zeros(shape, dtype=torch.uint8, device=device), torch.empty(elements, device=device)
        steps = []
        for given, noise, keep in ((values, None, False), (moved, None, True), (values, 5, True), (moved, 6, False)):
            generator = None if noise is None else torch.Generator(device).manual_seed(noise)
            own.encode_(given, codes, generator, keep=keep)
            steps += [codes.clone(), own.decode_(codes, out).clone()]
        results.append(steps)
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        assert torch.equal(one, other), (name, seed, number)


def assert_equal_steps(name: str, device: str) -> None:
    """Train coded layers by either."""
    trained = []
    for kernels in ("torch", "triton"):
        torch.manual_seed(0)
        model = quantise_(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))).to(device), name, kernels=kernels
        )
        optimizer = Muon.from_model(model, lr=0.02, rounding="stochastic", assign={"*": "muon"})
        for _ in range(2):
            model(torch.ones(4, 64, device=device)).square().mean().backward()
            optimizer.step()
        trained.append([parameter.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


@pytest.mark.skipif(not AVAILABLE, reason="needs Triton")
def test_every_byte_and_value_is_that_of_the_plain_code_where_triton_interprets_the_kernels():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, timeout=600)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_and_value_is_that_of_the_plain_code_on_a_gpu(name):
    assert_equal_codes(name, 0, "cuda")


@pytest.mark.skipif(not AVAILABLE, reason="needs Triton")
def test_where_triton_does_not_run_the_plain_code_does():
    assert_equal_codes("q8-0", 0, "cpu")


@pytest.mark.parametrize("name", ["iq2-s", "iq2-xs"])
def test_a_format_without_kernels_is_refused(name):
    with pytest.raises(OptimizerError, match="kernels: triton"):
        in_kernels(WEIGHT_FORMATS[name])


def test_kernels_that_nobody_has_are_refused():
    with pytest.raises(LookupError, match="kernels"):
        quantise_(nn.Sequential(nn.Linear(32, 32)), "q8-0", kernels="cuda")


@pytest.mark.skipif(not AVAILABLE, reason="needs Triton")
@pytest.mark.parametrize(("mixed", "group", "size"), [(False, 4, 98), (True, 8, 66)])
def test_the_kernel_of_a_grids_codes_compiles_for_a_gpu(mixed, group, size):
    import triton
    from triton.backends.compiler import GPUTarget

    from memplan.muon.weights.triton_grids import ROWS, _update_grid

    pointers = {"values": "*fp32", "blocks": "*u8", "noise": "*fp32", "count": "i32"}
    tables = {"grid": "*fp32", "halves": "*fp32", "closeness": "*fp32", "share": "fp32", "largest": "fp32"}
    fixed = {"GROUP": group, "BYTES": size, "MIXED": mixed, "POINTS": 256, "FINE": 256, "ROWS": ROWS, "NOISY": True}
    signature = {**pointers, **tables, **dict.fromkeys(fixed, "constexpr")}
    source = triton.compiler.ASTSource(fn=_update_grid, signature=signature, constexprs=fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
