"""The last steps of an import: degrees of parallelism from the number of GPUs, and what is still missing."""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd, prod
from typing import Any

from memplan.errors import printable
from memplan.importer.imported_job import GPUS, ImportedJob
from memplan.importer.python.python_settings import PARSED
from memplan.importer.python.python_words import VARIABLES
from memplan.importer.quantised_names import frozen_format, weights_by_name
from memplan.importer.reading import DEFAULTED, MODEL, OVERRIDDEN, STATED, Reading, Refusal, Result, need_of
from memplan.importer.sources.given_keys import MISSING
from memplan.importer.trainer_detection import is_program_of
from memplan.units import nearest_divisor

DEGREES = ("tensor", "pipeline", "context")
FEW = 3
"""Flags that a message names."""

RUN = "it can be executed without a GPU: memplan run SCRIPT --gpu NAME"


def finish(job: ImportedJob) -> ImportedJob:
    """Return a job with its GPUs shared out, and with what it still needs."""
    reading = job.reading
    _pipeline(job)
    if job.role == "launcher":
        reading.need("the trainer's file that this launches: give that file, and this one with --with")
        if count := reading.inputs.get("gpus") or job.value("launcher.processes"):
            _share_out(job, int(count))
    if job.role != "job" or job.head.missing:
        return job
    _fill_in(job)
    _refuse_own_script(job)
    gpus = reading.inputs.get("gpus") or job.value("launcher.processes")
    shards = _shards(job)
    if gpus is None and shards:
        if not any(need.startswith(GPUS) for need in reading.needs):
            reading.need(f"{GPUS}: {shards} are shared out among them")
    elif gpus is None:
        reading.results.setdefault(
            "training.parallel.data",
            Result(
                1,
                DEFAULTED,
                "",
                "",
                "no file says how many GPUs; one",
            ),
        )
        _accumulate(job, 1)
    else:
        _share_out(job, int(gpus))
    if job.value(MODEL) is None and not job.section("model"):
        _need(reading, MODEL, "no key names it; memplan fit MODEL --config FILE takes it besides")
    for key in ("sequence_length", "micro_batch_size"):
        if job.value(f"training.{key}") is None:
            _need(reading, key, f"no key says the {key.replace('_', ' ')}")
    _whole_groups(job, counted=gpus is not None)
    if not job.refused:
        job.leave_steps_open()
    return job


PLAIN_TRAINER = "transformers"
"""Whose arguments programs of one's own take most often, so that their flags tell no other trainer."""
MISSPELT = 1
"""Flags that a trainer does not have, and that may be misspelt ones of its own; more are another program's."""


def _refuse_own_script(job: ImportedJob) -> None:
    """Refuse a program of one's own that is given flags which its trainer does not have: they may change anything.

    transformers' parser ends a program that has no such argument, so that this one reads it.
    """
    main = job.sources[-1]
    own = [one for one in job.keys.unknown if one.source == main.name and main.value(one.key) is not MISSING]
    script = next((word for word in main.words if word.endswith((".py", ".sh"))), "")
    if main.form == "argv" and is_program_of(main, job.head):  # many scripts have names such as sft.py and finetune.py
        own = own if script and len(own) > MISSPELT else [one for one in own if script and not one.nearest]
    if main.form != "argv" or not main.words:
        return
    if script and job.head.trainer == PLAIN_TRAINER and not is_program_of(main, job.head):
        why = f"{printable(script, 60)} is not given: it is taken to hand its flags to Trainer, and to train all weights where none names adapters"
        job.reading.notes.append(("program", "transformers' Trainer", why))
    if not own:
        return
    script = script or main.words[-1]
    flags = ", ".join(printable(f"--{one.key}", 40) for one in own[:FEW])
    why = f"{printable(script, 60)} is a script of one's own, which reads {flags}{' and others' if own[FEW:] else ''}: {RUN}"
    job.reading.refusals.append(Refusal(own[0].key, main.name, own[0].line, main.value(own[0].key), why))


def _whole_groups(job: ImportedJob, *, counted: bool) -> None:
    """Note rows that are generated together and are no whole groups of one prompt's, at which a trainer stops.

    Source:
        ``GRPOConfig.__post_init__`` in trl/trainer/grpo_config.py (1.16.0), lines 1096 to 1136.
    """
    group, rows = job.value("method.rollout.generations"), job.value("training.micro_batch_size")
    if not isinstance(group, int) or not isinstance(rows, int) or job.value("method.stage") != "grpo":
        return
    several = job.value("method.rollout.micro_batches") or job.value("training.gradient_accumulation_steps")
    together = rows * _whole(several)
    world = _whole(job.value("training.parallel.data"))
    if together * world % group == 0:
        return
    if job.value("let.grouped"):
        why = f"{rows} sequences are no whole groups of {group} completions; the trainer takes one group in their place"
        job.reading.results["training.micro_batch_size"] = Result(group, OVERRIDDEN, "", "", why)
        return
    said = job.reading.results["method.rollout.generations"]
    text = f"{group} rows belong to each prompt (num_generations), and {together} are generated together on each GPU"
    if counted:
        job.reading.problems.append(f"{said.source}: {text}: expected whole groups on {world} of them")
    else:
        why = f"no file says how many GPUs; one, which stands for each of a multiple of {group // gcd(group, together)}: {text}"
        job.reading.results["training.parallel.data"] = Result(world, DEFAULTED, "", "", why)


def _pipeline(job: ImportedJob) -> None:
    """Set how many micro-batches pass a pipeline together, where a trainer states the batch that these divide."""
    rows, total = job.value("training.micro_batch_size"), job.value("let.local_batch_size")
    if not (isinstance(rows, int) and isinstance(total, int) and rows > 0):
        return
    if total % rows:
        job.reading.problems.append(f"a batch of {total} does not divide into micro-batches of {rows}")
        return
    why = f"{total} sequences a GPU, {rows} a micro-batch of the pipeline"
    job.reading.results["training.parallel.micro_batches"] = Result(total // rows, STATED, "", "", why)


def _need(reading: Reading, name: str, why: str) -> None:
    """Note that a result is missing, where no key of the file has said so."""
    if not any(need.startswith(need_of(name)) for need in reading.needs):
        reading.need(f"{need_of(name)}: {why}")


def _fill_in(job: ImportedJob) -> None:
    """State what a training config says in other places than trainers do: the stack, and the format of hidden matrices."""
    results = job.reading.results
    weights = results.get("training.weights.default")
    _name_weights(job)
    if job.value("let.paged"):
        why = "paged states are counted as if they stayed on the GPU; CUDA moves them to the host where it is full"
        job.reading.notes.append(("optimizer", "resident", why))
    main = job.sources[-1]
    if main.form != "argv" and any(word.endswith((*PARSED, *VARIABLES)) for word in main.words):
        why = "nothing gives the program others"
        job.reading.notes.append(("flags and variables", "their defaults", why))
    if weights is not None:
        results.setdefault("training.weights.hidden_matrix", replace(weights, why=weights.why))
    version = job.reading.inputs.get("version")
    older = version if version and version != job.mapped.version else ""
    if job.mapped.stack:
        name = f"{job.mapped.stack}@{older}" if older else job.mapped.stack
        results.setdefault("training.stack", Result(name, STATED))


def _name_weights(job: ImportedJob) -> None:
    """Take up what a model's name says of its weights: transformers loads them so, whatever the trainer's file says."""
    given = job.reading.results.get(MODEL, Result("", DEFAULTED))
    name = str(given.value)
    kind = weights_by_name(name)
    if kind is None or job.value("training.weights.hidden_matrix") not in (None, "bf16", "fp16", "fp32"):
        return
    format_name = frozen_format(name)
    if format_name is not None and job.value("training.adapter.kind") is not None:
        why = "the model's name says that its weights are quantised so; its config.json says it for sure"
        job.reading.results["training.weights.hidden_matrix"] = Result(format_name, DEFAULTED, "", "", why)
        job.reading.results["method.tuning"] = Result("qlora", DEFAULTED, "", "", why)
    else:
        line = next((keys.line(given.key) for keys in job.sources if keys.name == given.source), 1)
        why = f"the name says that its weights are {kind}, which nothing trains here; name the model as it was released"
        job.reading.refusals.append(Refusal(given.key, given.source, line, name, why))
        results = job.reading.results
        results["training.weights.hidden_matrix"] = Result(kind, DEFAULTED, "", "", "the model's name says so")
        if job.value("training.adapter.kind") is not None and "8" not in kind:
            results["method.tuning"] = Result("qlora", DEFAULTED, "", "", "adapters over weights of 4 bits or fewer")


def _shards(job: ImportedJob) -> str:
    """Return what is shared out among GPUs, in words; nothing where every GPU is alike."""
    stage = job.value("training.parallel.zero_stage") or 0
    if job.value("let.unread") and "training.parallel.zero_stage" not in job.reading.results:
        return f"the shards of {printable(job.value('let.unread'), 60)}"
    degrees = [name for name in DEGREES if (job.value(f"training.parallel.{name}") or 1) > 1]
    if isinstance(stage, int) and stage > 0 and not job.value("training.parallel.data"):
        return f"ZeRO stage {stage}'s shards"
    return f"{' and '.join(degrees)} parallel parts" if degrees else ""


def _share_out(job: ImportedJob, gpus: int) -> None:
    """Set the data parallel degree that is left of so many GPUs, and accumulation that follows from it."""
    results = job.reading.results
    given = job.reading.inputs.get("degrees", {})
    degrees = {
        name: _whole(given.get(name, job.value(f"training.parallel.{name}"))) for name in (*DEGREES, "replicate")
    }
    parts = prod(degrees.values())
    data = max(gpus * degrees["replicate"] // parts, 1)
    problem = "" if job.reading.inputs.get("gpus") or not given else _undivided(gpus, degrees, given.get("data"))
    if problem:
        job.reading.problems.append(f"{problem}; --gpus says another number")
        return
    if gpus % parts:
        text = f"the file shares the job out over a multiple of {parts} GPUs, not over {gpus}"
        if job.reading.inputs.get("gpus"):
            job.reading.problems.append(f"--gpus {gpus}: {text}")
        else:
            job.reading.need(f"{GPUS}: {text}, which its launcher starts")
        return
    stated = results.get("training.parallel.data")
    if stated is None or stated.rank == DEFAULTED:
        results["training.parallel.data"] = Result(data, STATED, "gpus", "", f"{gpus} GPUs")
    elif stated.value != data and "data" not in given:
        text = f"{stated.key} shards over {stated.value} data parallel GPUs, and {gpus} GPUs leave {data}"
        job.reading.problems.append(f"{stated.source}: {text}; say one of them otherwise")
        return
    _accumulate(job, data)


def _undivided(gpus: int, degrees: Mapping[str, int], data: Any) -> str:
    """Return why GPUs that a file starts cannot be shared out by degrees that are given over its own; nothing if they can."""
    parts = prod(degrees.values())
    if gpus % parts:
        words = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        near = nearest_divisor(gpus, parts)
        return f"parallel: the file's {gpus:,} GPUs are no multiple of {words} = {parts:,}; the nearest that divides them: {near}"
    left = gpus * degrees["replicate"] // parts
    other = isinstance(data, int) and data != left
    return f"parallel.data: the file's {gpus:,} GPUs leave {left} for data parallelism, not {data}" if other else ""


def _accumulate(job: ImportedJob, world: int) -> None:
    """Set how many micro-batches make up a global batch."""
    results = job.reading.results
    total = job.value("let.global_batch_size")
    rows = job.value("training.micro_batch_size")
    stated = results.get("training.gradient_accumulation_steps")
    rows = rows and int(rows) * _whole(job.value("training.parallel.micro_batches"))
    if job.value("let.exact_batches") and (count := job.reading.inputs.get("degrees", {}).get("micro_batches")):
        why = f"a step of {count} micro-batches is asked for, over the global batch of the file"
        results["training.gradient_accumulation_steps"] = Result(1, STATED, "", "", why)
        return
    if total and rows and (stated is None or stated.rank == DEFAULTED):
        each = int(rows) * world
        if job.value("let.exact_batches") and int(total) % each:
            near = max(round(int(total) / each), 1) * each
            text = f"{total} sequences a step are no multiple of {rows} of a micro-batch x {world} data parallel GPUs"
            job.reading.problems.append(
                f"{results['let.global_batch_size'].source}: {text} = {each}; the nearest that is: {near}"
            )
            return
        steps = max(int(total) // each if job.value("let.whole_batches") else -(-int(total) // each), 1)
        results["training.gradient_accumulation_steps"] = Result(
            steps, STATED, "", "", f"{total} sequences a step, {rows} a micro-batch, on {world} data parallel GPUs"
        )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
