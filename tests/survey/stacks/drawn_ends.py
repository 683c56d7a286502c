"""Jobs whose ends train beside adapters: adapters on embedding and head, or copies of these and of norms trained whole."""

from dataclasses import replace
from random import Random
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.training.adapted_ends import last_part
from tests.survey.drawn_jobs import Job, resolved
from tests.survey.drawn_models import TOWERS
from tests.survey.stacks.drawn_stack_jobs import StackJob


def with_ends(job: StackJob, seed: int, number: int, catalog: Catalog) -> StackJob:
    """Return a job with adapters, which are put on its ends too or beside which ends and norms train, as is drawn."""
    rng, training, model = Random(f"memplan ends {seed} {number}"), dict(job.job.training), dict(job.job.model)
    kind = rng.choice(("lora", "lora", "lora", "dora"))
    wide = "fp32" if training["compute_dtype"] == "fp32" else rng.choice(("fp32", training["compute_dtype"]))
    adapter: dict[str, Any] = {"kind": kind, "rank": rng.choice((4, 16)), "dtype": wide}
    adapter |= training.get("adapter", {})
    names = resolved(Job(model, {**training, "adapter": adapter}), catalog)[0].spec.names
    table, head = last_part(names.embedding), last_part(names.head)
    ends = rng.choice(([table], [head], [table, head]))
    if rng.random() < 0.5:
        adapter["modules_to_save"] = rng.choice((ends, ends, [*ends, last_part(names.final_norm)]))
    else:
        adapter["targets"] = [*adapter.get("targets", ["all-linear"]), *ends]
        if model["model_type"] in TOWERS:  # whose patches are projected by a module of a linear layer's name
            adapter["vision"] = False
        adapter["kind"] = "lora" if table in ends else adapter["kind"]
    if "targets" not in adapter and rng.random() < 0.3:
        adapter["dropout"] = 0.1
    if "tie_word_embeddings" in model:
        model["tie_word_embeddings"] = rng.random() < 0.5
    training.pop("optimizer", None)
    return replace(job, job=Job(model, {**training, "adapter": adapter}))
