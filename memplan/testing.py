"""For other projects' tests: a training job that stops fitting fails a test, long before a GPU is rented.

Example:
    >>> from memplan.testing import assert_fits
    >>> plan = assert_fits("llama-3.1-8b", config="lora", gpu="h100-sxm-80gb", limit="70 GiB")
    >>> plan.verdict
    'fits'
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import memplan
from memplan.budget.budget_jobs import Basis, Defaults, JobEntry, Place, job_of
from memplan.budget.evaluation import evaluated
from memplan.documents.loading import Document
from memplan.errors import InvalidFileError
from memplan.library.budget_plans import figures
from memplan.library.lookup import open_catalog
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.units import format_bytes


def assert_fits(
    model: str,
    *,
    config: str,
    gpu: str,
    limit: str | None = None,
    components: Mapping[str, str] | None = None,
    basis: Basis = "expected",
    settings: Mapping[str, Any] | None = None,
    catalog: Path | None = None,
) -> MemoryPlan:
    """Fail unless a training job fits: on its GPU, and within the limits that are given.

    Args:
        config: Training config: catalog name, or a path.
        limit: Most that the device total may be, such as ``"70 GiB"``.
        components: Most that single components may be, such as ``{"activations": "8 GiB"}``.
        basis: ``expected``, or ``upper`` for the upper end of the interval.
        settings: Keys of the training config to replace, such as ``{"micro_batch_size": 4}``.
        catalog: Your own catalog file or folder, added to ours.

    Returns:
        The plan, for further assertions.

    Raises:
        AssertionError: It does not fit; the message has every component.
        MemplanError: An unknown name, an invalid file or limit, or a job that is not modelled.
    """
    __tracebackhide__ = True
    known = open_catalog(catalog)
    place = Place(Document("assert_fits", {}, {}), (), Path())
    entry = JobEntry(name="job", model=model, config=config, gpu=gpu, limit=limit, components=components, basis=basis)
    job, problems = job_of(entry, Defaults(), place)
    if job is None or problems:
        raise InvalidFileError(problems)
    device = Device(known.gpus[gpu], known.gpus.name_of(gpu))
    plan = memplan.plan(model, config=config, gpu=device, set=settings, catalog=known).memory
    needed = figures(plan, "", "")
    messages = [finding.message for finding in evaluated(job, needed, None).findings]
    if messages:
        lines = [f"  {name}: {format_bytes(size)}" for name, size in needed.components.items()]
        head = f"{model} with {config} on {device.name} {'; '.join(messages)}"
        raise AssertionError("\n".join([head, *lines]))
    return plan
