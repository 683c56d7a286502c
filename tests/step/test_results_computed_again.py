"""What reentrant checkpointing computes again: its result stays where it was made."""

import memplan
from memplan.plan.reserve.simulation import events_of

BETWEEN = 4
"""Events within which a result was freed and made anew."""


def test_a_layers_result_stays_where_it_was_made_until_its_backward_is_done():
    setting = {"activation_checkpointing": "full"}
    plan = memplan.plan(
        "qwen2.5-0.5b", gpu="a100-80gb", config="lora", stack="llama-factory", sequence_length=64, set=setting
    )
    codes = events_of(plan.memory, 1).codes
    assert plan.memory.setup.stack.checkpointing.reentrant
    assert not any(code & 1 and code - 1 in codes[n + 1 : n + BETWEEN] for n, code in enumerate(codes))
