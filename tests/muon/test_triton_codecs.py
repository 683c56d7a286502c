"""Codecs of momentum as Triton kernels: in its interpreter, where there is no GPU, every byte is that of the plain code."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from memplan.muon import Muon, OptimizerError
from memplan.muon.state_codecs import triton_codecs
from memplan.muon.state_codecs.codecs import Stretch
from memplan.muon.state_codecs.state_formats import momentum_codec

INTERPRETED = """
import sys, torch
from tests.muon.test_triton_codecs import assert_equal_codes, assert_equal_steps
for name in ("int8", "int4", "int2", "gauss4", "gauss2"):
    for block, scale in ((128, "fp32"), (64, "bf16"), (32, "fp16"), (2048, "fp32")):
        for noisy in (False, True):
            assert_equal_codes(name, block, scale, noisy, "cpu")
for options in ({"momentum_format": "int4"}, {"momentum_format": "gauss2", "momentum_rounding": "stochastic"}):
    assert_equal_steps(options, "cpu")
"""


def assert_equal_codes(name, block, scale, noisy, device):
    """Values of every size, blocks of zeros, of one magnitude and of ties, and an end inside a block."""
    torch.manual_seed(0)
    plain = momentum_codec(name, block, scale)
    elements, length = 4500, -(-4500 // block) * block
    values = torch.randn(length) * torch.logspace(-12, 6, length // block).repeat_interleave(block)
    values[:block], values[block : block + 8] = 0.0, torch.arange(8) / 7 * 3
    values[-block // 2 :] = 0.37
    values[elements:] = 0.0
    values, noise = values.to(device), torch.rand(length).to(device) if noisy else None
    results = []
    for codec in (plain, triton_codecs.in_one_kernel(plain)):
        state, scratch = codec.empty("momentum_buffer", elements, values.device), codec.scratch(length, values.device)
        drawn = None if noise is None else noise.clone()
        spare = torch.empty_like(values)
        whole = Stretch(state, "momentum_buffer", 0, elements)
        codec.store(values.clone(), whole, scratch, drawn, spare=spare)
        results.append([*state.values(), codec.load(whole, scratch).clone()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other), (name, block, scale, noisy)


def assert_equal_steps(options, device):
    """Whole steps, one by one and together."""
    found = []
    for kernels, budget in (("torch", 0), ("triton", 0), ("triton", 1 << 20)):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(32, 64, device=device)) for _ in range(2)]
        optimizer = Muon(parameters, lr=0.02, codec_kernels=kernels, batch_bytes=budget, ns_dtype="fp32", **options)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        found.append([*parameters, *(t for p in parameters for t in optimizer.state[p].values())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), options


def test_every_byte_is_that_of_the_plain_code_where_triton_interprets_the_kernels():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True, timeout=300)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["int8", "int4", "int2", "gauss4", "gauss2"])
def test_every_byte_is_that_of_the_plain_code_on_a_gpu(name):
    for block, scale in ((128, "fp32"), (64, "bf16"), (32, "fp16"), (2048, "fp32")):
        for noisy in (False, True):
            assert_equal_codes(name, block, scale, noisy, "cuda")


@pytest.mark.parametrize("format", ["fp32", "bf16", "gauss3", "ternary", "int8"])
def test_what_no_kernel_runs_is_refused_in_words(format):
    with pytest.raises(OptimizerError, match=r"codec_kernels.*torch"):
        Muon([nn.Parameter(torch.zeros(32, 32))], momentum_format=format, codec_kernels="triton")
