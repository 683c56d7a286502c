"""What torch's compiler is given of a norm that CUDA has as one kernel."""

import pytest
import torch
import torch.nn.functional as F

from memplan.trace.compiled import compiler
from memplan.trace.pretended_cuda.composite_kernels import composite_kernels


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fused_norm_is_taken_apart_and_not_an_empty_result(monkeypatch):
    sources = []
    made = compiler.program
    monkeypatch.setattr(compiler, "program", lambda source, *rest: sources.append(source) or made(source, *rest))
    rows = torch.empty(8, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with composite_kernels("9.0"), compiler.pretended_compiler("9.0"):
        torch.compile(lambda: F.rms_norm(rows, (64,), weight) * 2)().sum().backward()
    assert rows.grad.shape == rows.shape
    forward, backward = sources
    assert "rsqrt" in forward
    assert "rsqrt" in backward
