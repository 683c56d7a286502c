"""The measurement plans: how much they cover, before anything is run."""

from memplan.measure.records.measurement_plans import cpu_tasks, cuda_tasks, task_label
from memplan.measure.task import task_data, task_of
from memplan.model.inventory import parameter_count
from memplan.units import GIB

from .boundary import boundary_tasks


def test_the_plan_for_a_gpu_has_at_least_sixty_configurations_each_with_a_name_of_its_own(catalog):
    tasks = list(cuda_tasks(catalog))
    assert len(tasks) >= 60
    assert len({task_label(task) for task in tasks}) == len(tasks)


def test_the_plan_for_a_gpu_spans_sizes_tiers_precisions_and_both_allocators(catalog):
    tasks = list(cuda_tasks(catalog))
    sizes = [parameter_count(task.model.inventory) for task in tasks]
    assert min(sizes) < 200e6
    assert max(sizes) > 8e9
    assert {"tier1", "tier2", "tier3", "bf16-adamw", "mixed-adamw", "lora"} <= {task.setup.name for task in tasks}
    assert {"none", "full"} <= {task.setup.config.activation_checkpointing for task in tasks}
    assert {task.alloc_conf for task in tasks} == {"", "expandable_segments:True"}


def test_a_smaller_card_has_a_shorter_plan(catalog):
    assert 0 < len(list(cuda_tasks(catalog, 16 * GIB))) < len(list(cuda_tasks(catalog)))


def test_the_plan_for_a_cpu_has_every_shipped_config(catalog):
    assert {task.setup.name for task in cpu_tasks(catalog)} == set(catalog.configs.entries)


def test_what_a_record_keeps_of_a_task_is_enough_to_build_it_again(catalog):
    for task in cpu_tasks(catalog):
        again = task_of(task_data(task), catalog, "record")
        assert again.setup == task.setup
        assert again.model == task.model


def test_boundaries_are_tried_on_both_sides_at_least_twenty_times_each(catalog):
    cases = list(boundary_tasks(catalog, "9.0", 80 * GIB))
    assert sum(runs for _, runs in cases) >= 20
    assert sum(not runs for _, runs in cases) >= 20
