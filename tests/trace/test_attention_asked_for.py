"""What torch answers a library that asks which kernel of attention it would take on a card."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memplan.trace.pretended_cuda.composite_kernels import composite_kernels


@pytest.mark.parametrize(
    ("card", "dtype", "backend"),
    [
        ("7.5", torch.float16, SDPBackend.MATH),  # grouped heads, which the efficient kernel does not take
        ("8.0", torch.bfloat16, SDPBackend.FLASH_ATTENTION),
        ("9.0", torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
        ("9.0", torch.float32, SDPBackend.MATH),
    ],
)
def test_the_kernel_that_torch_names_is_the_cards(card, dtype, backend):
    query, key = (torch.empty(1, heads, 128, 64, device="meta", dtype=dtype) for heads in (8, 2))
    with composite_kernels(card):
        assert torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=True) == backend.value


def test_kernels_that_are_switched_off_are_not_named():
    query = torch.empty(1, 8, 128, 64, device="meta", dtype=torch.bfloat16)
    with composite_kernels("9.0"), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert torch._fused_sdp_choice(query, query, query, is_causal=True) == SDPBackend.FLASH_ATTENTION.value
