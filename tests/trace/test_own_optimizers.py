"""Optimizers that a user adds: the plan of an entry against a step of the class that it names."""

import pytest

from memplan.catalog.catalog import Catalog, data_directory
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.plan.planner import CompiledPlan
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.catalog.additions import AMSGRAD, NOBODYS, RMSPROP, catalog_text
from tests.lab.test_optimizers import differences, shaped


def planned(write, body, shape="blocks", **keys):
    catalog = Catalog(data_directory(), write("mine.yaml", catalog_text("optimizers", body)))
    setup = resolve(TrainingConfig("", optimizer={"default": "mine"}, sequence_length=16, **keys), catalog, "test")
    return CompiledPlan(shaped(shape, catalog), setup), catalog


@pytest.mark.parametrize("shape", ["odd, tied", "blocks", "blocks, with experts"])
@pytest.mark.parametrize("kernel", ["foreach", "fused", "for-loop"])
def test_three_states_of_a_known_class_are_planned_as_it_steps(write, shape, kernel):
    plan, catalog = planned(write, AMSGRAD, shape, kernels=Kernels(optimizer=kernel))
    assert differences(plan, catalog) == {}


@pytest.mark.parametrize("shape", ["odd, tied", "blocks"])
def test_three_states_of_a_class_of_ones_own_are_planned_as_it_steps(write, shape):
    plan, catalog = planned(write, RMSPROP, shape)
    assert differences(plan, catalog) == {}


def test_a_trace_shows_scratch_that_an_entry_understates(write):
    plan, catalog = planned(write, RMSPROP.replace("all_tensors: 1", "largest_tensor: 1"))
    assert "optimizer step" in differences(plan, catalog)


@pytest.mark.parametrize("kernel", ["fused", "for-loop"])
def test_scratch_that_is_stated_for_one_kernel_is_of_no_other(write, kernel):
    with pytest.raises(CannotAnswerError, match="scratch memory of foreach"):
        planned(write, RMSPROP, kernels=Kernels(optimizer=kernel))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("torch.optim.RMSprop", "torch.optim.RMSdrop", "cannot be imported"),
        ("torch.optim.RMSprop", "torch.nn.Linear", r"is no torch\.optim\.Optimizer"),
        ("centered: true", "central: true", "does not take its options"),
        ("    - {name: grad_avg, as_parameter: true}\n", "", "keeps grad_avg, which its entry has no slot for"),
    ],
)
def test_a_class_that_is_not_what_an_entry_says_is_refused_when_it_is_traced(write, old, new, words):
    plan, _ = planned(write, RMSPROP.replace(old, new))
    with pytest.raises(CannotAnswerError, match=words):
        trace_training(plan.model, plan.setup)


def test_states_without_a_class_are_traced_and_their_update_is_said_not_to_be(write):
    plan, _ = planned(write, NOBODYS)
    trace = trace_training(plan.model, plan.setup)
    assert trace.notes == ("scratch of the mine update is not traced",)
