"""Which kernel torch takes for attention, card by card."""

import pytest

from memplan.step.kernels.attention_choice import AttentionCall, chosen_kernel


@pytest.mark.parametrize(
    ("capability", "call", "kernel"),
    [
        ("8.0", AttentionCall("bf16", 128, 128), "flash"),
        ("8.0", AttentionCall("bf16", 128, 128, masked=True), "efficient"),
        ("8.0", AttentionCall("bf16", 128, 128, grouped=True), "flash"),
        ("8.0", AttentionCall("bf16", 128, 128, grouped=True, masked=True), "math"),
        ("8.0", AttentionCall("fp32", 128, 128), "efficient"),
        ("8.0", AttentionCall("fp32", 128, 128, grouped=True), "math"),
        ("8.0", AttentionCall("bf16", 192, 128), "efficient"),
        ("8.6", AttentionCall("bf16", 256, 256), "flash"),
        ("8.6", AttentionCall("bf16", 208, 208), "efficient"),
        ("8.6", AttentionCall("bf16", 208, 208, trained=False), "flash"),
        ("8.0", AttentionCall("bf16", 208, 208), "flash"),
        ("7.5", AttentionCall("fp16", 64, 64), "efficient"),
        ("7.5", AttentionCall("fp16", 64, 64, grouped=True), "math"),
        ("7.5", AttentionCall("bf16", 64, 64), "math"),
        ("7.5", AttentionCall("fp16", 60, 60), "math"),
        ("9.0", AttentionCall("bf16", 128, 128), "cudnn"),
        ("9.0", AttentionCall("bf16", 128, 128, masked=True), "cudnn"),
        ("9.0", AttentionCall("bf16", 256, 256), "flash"),
        ("9.0", AttentionCall("bf16", 128, 128, dropout=0.1), "flash"),
        ("9.0", AttentionCall("fp32", 128, 128), "efficient"),
        ("10.0", AttentionCall("bf16", 192, 128), "cudnn"),
    ],
)
def test_the_first_kernel_that_can_is_taken(capability, call, kernel):
    assert chosen_kernel(call, capability) == kernel
