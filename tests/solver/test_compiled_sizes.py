"""Batches and lengths that are named for compiled layers: those that can be planned."""

from dataclasses import replace

import pytest

from memplan.errors import CannotAnswerError
from memplan.plan.memory_plan import Device
from memplan.solver.largest_per_device import largest_values
from tests.step.test_compiled_layers import planned


@pytest.mark.parametrize(("what", "batch", "length", "apart"), [("sequence", 2, 64, 4), ("batch", 8, 20, 2)])
def test_the_largest_has_tokens_that_are_not_padded(what, batch, length, apart):
    plan = planned("torchtitan", "none", "cudnn", batch, length)
    tight = Device(replace(plan.device.gpu, cuda_total_bytes=plan.device_bytes + 2**29), plan.device.name)
    (found,) = largest_values(what, plan.model, plan.setup, [tight])
    assert found.fits.apart == apart
    assert found.fits.value > apart
    assert found.fits.value % apart == 0
    assert found.following.verdict != "fits" == found.plan.verdict


@pytest.mark.parametrize(("what", "batch", "length"), [("batch", 3, 20), ("sequence", 2, 63)])
def test_the_largest_is_found_from_a_batch_or_length_that_would_be_padded(what, batch, length):
    plan = planned("torchtitan", "none", "cudnn", 8, 64)
    config = replace(plan.setup.config, micro_batch_size=batch, sequence_length=length)
    tight = Device(replace(plan.device.gpu, cuda_total_bytes=plan.device_bytes + 2**29), plan.device.name)
    (result,) = largest_values(what, plan.model, replace(plan.setup, config=config), [tight])
    tokens = result.fits.value * (length if what == "batch" else batch)
    assert tokens > 8
    assert tokens % 8 == 0
    assert result.plan.verdict == "fits" != result.following.verdict


def test_the_upper_end_has_the_worst_order_that_the_compiler_tries():
    plan = planned("torchtitan", "none", "cudnn", 1, 192, parallel={"data": 64, "zero_stage": 3})
    assert plan.doubt_bytes > 0
    alone = replace(plan, doubt_bytes=0)
    assert plan.upper_bytes > alone.allowances.upper_bytes(alone.allocated_bytes)
    assert any("worst order of kernels" in text for text in plan.assumptions)


def test_padded_tokens_are_refused():
    with pytest.raises(CannotAnswerError, match="3 x 20 tokens, no multiple of 8"):
        planned("torchtitan", "none", "cudnn", 3, 20)
