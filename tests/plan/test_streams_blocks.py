"""What rules out a number of GPUs before its run is simulated: blocks of a rank's streams, none of which serves another."""

from dataclasses import replace

import pytest

from memplan.library.lookup import Overrides, catalog_model, find_setup
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import exceeds_in_blocks, simulated
from memplan.training.stack_models import as_trained
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()


@pytest.mark.parametrize(
    ("model", "config", "stack", "sets"),
    [
        ("gpt2", "bf16-adamw", "", ()),
        ("qwen2.5-0.5b", "qlora", "trl", ()),
        ("gpt2", "qlora", "trl", ("sequence_length=100",)),
        ("qwen3-0.6b", "lora", "transformers", ("parallel.engine=fsdp1",)),
    ],
)
@pytest.mark.parametrize("gpus", [2, 7])
def test_a_card_that_a_simulated_run_fits_is_not_ruled_out_by_blocks(model, config, stack, sets, gpus):
    sets = ("sequence_length=512", *sets, "parallel.zero_stage=3", f"parallel.data={gpus}")
    setup = find_setup(config, Overrides(settings=sets, stack=stack or None), CATALOG, None)
    compiled = CompiledPlan(as_trained(catalog_model(model, CATALOG), setup), setup)
    gpu = CATALOG.gpus["h100-sxm-80gb"]
    upper_bytes = simulated(compiled.evaluate(Device(gpu, "roomy", 1)), least=False).upper_bytes
    just = Device(replace(gpu, cuda_total_bytes=upper_bytes), "just", 1)
    plan = simulated(compiled.evaluate(just), least=False)
    assert plan.verdict == "fits"
    assert not exceeds_in_blocks(compiled.evaluate(just))
