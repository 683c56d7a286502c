"""What there is before each action of a pipeline's rank is what the actions before it have left."""

from collections import Counter

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.step.pipelines.pipeline_schedules import stages_of
from memplan.step.pipelines.rank_timeline import _all_moments

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved-zero-bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_micro_batches_wait_from_forward_to_backward_and_weights_for_their_own_part(schedule, virtual, rank):
    parallel = Parallel(pipeline=4, virtual=virtual, schedule=schedule, micro_batches=8)
    stages, done = stages_of(rank, parallel), Counter()
    for number, (action, there) in enumerate(_all_moments(rank, parallel)):
        if not number:
            assert not any((*there.gathered, *there.summed, *there.reduced, there.tail.gathered, there.tail.summed))
        for index, stage in enumerate(stages):
            back = done["backward", stage] + done["input", stage]
            assert there.pairs[index] == done["forward", stage] - back
            assert there.waiting[index] == done["input", stage] - done["weight", stage]
            assert there.summed[index] == bool(done["backward", stage] + done["weight", stage])
        done[action.kind, action.stage] += 1
    assert {done["forward", stage] for stage in stages} == {8}
