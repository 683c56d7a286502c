"""Changes that make a job fit, written in its trainer's own keys: ``memplan.rewrite``."""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from memplan.catalog.catalog import Catalog
from memplan.documents.opening import read_text, usable_path
from memplan.dryrun.terms.outcome import CalledJob
from memplan.errors import CannotAnswerError, MemplanError, MemplanWarning, printable
from memplan.importer.imported_job import ImportedJob
from memplan.importer.reading import STATED
from memplan.importer.sources.given_keys import NO_LINE, shown_place
from memplan.library.answers.answer import Answer
from memplan.library.answers.planned_job import Plan, plan, plan_by_share
from memplan.library.argument_kinds import checked
from memplan.library.job_options import FilePath, JobOptions, catalog_of, job_inputs
from memplan.library.lookup.model_lookup import Shapes, find_model
from memplan.library.lookup.trainer_files import GivenFiles, trainer_job, training_document
from memplan.library.trainers.imported_file import import_file
from memplan.library.trainers.spliced_text import Edit, spliced
from memplan.plan.memory_plan import Device, Suggestion
from memplan.plan.reserve.simulation import Runs, simulated
from memplan.plan.suggested.config_changes import Change, accumulation_cost, changes
from memplan.report.document import Document
from memplan.report.trainers.trainer_file_answers import Rewritten, rewrite_document
from memplan.training.own_settings import is_settable, own_settings, with_words

KEPT = ("sequence_length", "weights", "adapter", "parallel", "offload", "allocator", "gradients", "clip_gradients")
"""Keys that are not changed: what is trained, on what, and what other files or the environment say."""
CHANGED_FIRST = ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "optimizer.default")
MOST_ROUNDS = 12
SUFFIXES = (".yaml", ".yml", ".json", ".toml")


@dataclass(frozen=True, repr=False, eq=False)
class Rewrite(Answer):
    """A trainer's file as it is and as it could be."""

    rewritten: Rewritten  # Both texts, both plans, and what was changed

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan suggest`` for a trainer's file."""
        return rewrite_document(self.rewritten, unit, strict)


@dataclass(frozen=True, slots=True)
class _File:
    """A trainer's file and what its job is planned with."""

    path: str
    options: JobOptions
    shares: dict[str, Plan] = field(default_factory=dict)  # Plans by share, by the text of the file
    plans: dict[str, Plan] = field(default_factory=dict)  # Those that were simulated, without the least that each needs
    runs: Runs = field(default_factory=Runs)  # Their runs

    def plan(self, content: str, *, least: bool = False) -> Plan:
        """Return the plan of the job that the file would describe.

        Args:
            least: Whether the least that it needs is looked for, which a search does without.
        """
        plan = self.by_share(content)
        if least:
            return Plan(simulated(plan.memory, runs=self.runs), plan.catalog)
        if content not in self.plans:
            self.plans[content] = Plan(simulated(plan.memory, least=False, runs=self.runs), plan.catalog)
        return self.plans[content]

    def fits(self, content: str) -> bool:
        """Whether that job is sure to fit; where its tensors alone are too much, it is not simulated."""
        return not self.by_share(content).memory.exceeds_device and self.plan(content).verdict == "fits"

    def needs_less(self, content: str, before: str) -> bool:
        """Whether that job needs less than before; where the tensors of both alone are too much, neither is simulated."""
        texts = content, before
        shares = [self.by_share(text) for text in texts]
        both = all(plan.memory.exceeds_device for plan in shares)
        one, other = shares if both else [self.plan(text) for text in texts]
        return one.expected_bytes < other.expected_bytes

    def by_share(self, content: str) -> Plan:
        """Return the same with a share as the allocator's reserve."""
        if content not in self.shares:
            with warnings.catch_warnings():
                if self.shares:  # what is said of the reader's own text is said once
                    warnings.simplefilter("ignore", MemplanWarning)
                self.shares[content] = self._planned(content)
        return self.shares[content]

    def _planned(self, content: str) -> Plan:
        catalog = catalog_of(self.options.get("catalog"))
        sizes = {key: self.options.get(key) for key in ("micro_batch_size", "sequence_length")}
        given = {key: size for key, size in sizes.items() if size is not None}
        gpus = self.options.get("gpus")
        files = self.files(content)
        job = trainer_job(files, gpus)
        model = find_model(self.path, Shapes(), catalog) if job.refused_for_experts else None
        data = training_document(files, gpus, catalog, given, model).data
        name = job.value("model.given")
        options: dict[str, Any] = {**self.options, "catalog": catalog, "config": data, "beside": None}
        options["trainer_version"] = None
        return plan_by_share(name if name and files.beside else self.path, **options)

    def files(self, content: str | None) -> GivenFiles:
        """Return that file of a text, with what goes with it."""
        beside = tuple(map(str, self.options.get("beside") or ()))
        return GivenFiles(self.path, beside, self.options.get("trainer_version") or "", content)


@checked
def rewrite(file: FilePath, **options: Unpack[JobOptions]) -> Rewrite:
    r"""Return the cheapest changes of a trainer's file with which its job fits, in the trainer's own keys.

    The batch of a step stays: a smaller micro-batch has more accumulation steps.

    Args:
        file: A trainer's YAML, JSON or TOML file, or commands as JSON.
        options: Keywords of :class:`memplan.JobOptions`: the GPU, and files beside it.

    Raises:
        CannotAnswerError: The job cannot be planned, or the file is of a kind whose text is not edited.

    Example:
        >>> import memplan
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> keys = ("base_model: Qwen/Qwen2.5-7B", "adapter: lora", "micro_batch_size: 8", "sequence_len: 1024")
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "axolotl.yaml")
        ...     _ = file.write_text("\n".join(keys))
        ...     answer = memplan.rewrite(file, gpu="rtx4090")
        >>> answer.rewritten.after_text.splitlines()[1:4]
        ['gradient_accumulation_steps: 8', 'adapter: lora', 'micro_batch_size: 1']
    """
    job_inputs("rewrite", None, options)
    path = os.fspath(file)
    one, edited = _File(path, options), path.endswith(SUFFIXES)
    text = read_text(usable_path(path)) if edited else None
    job = trainer_job(one.files(text), options.get("gpus"))
    if text is None or (not path.endswith(".json") and all(keys.form == "argv" for keys in job.sources)):
        raise _by_hand(path, job)
    before = after = one.plan(text, least=True)
    content, made = text, tuple[Change, ...]()
    if before.verdict != "fits":
        _, content, made = _search(one, text, before)
        after = one.plan(content, least=True) if made else before
    shown = Rewritten(path, text, content, before.memory, after.memory, _costs(before, after, made))
    return Rewrite(shown)


def _by_hand(path: str, job: ImportedJob) -> CannotAnswerError:
    """Return the error for a script or program, which says where it holds what is changed first."""
    keys = [key for key in job.reading.used.values() if key.line != NO_LINE]
    keys = [key for key in keys if any(effect.partition(" = ")[0] in CHANGED_FIRST for effect in key.effects)]
    places = ", ".join(f"{printable(key.key)} in {shown_place(key.source, key.line)}" for key in keys)
    where = f"; it is said by {places}" if places else ""
    return CannotAnswerError(
        f"{path}: only keys of YAML, JSON and TOML files are edited; memplan fit says what to change{where}"
    )


def _costs(before: Plan, after: Plan, made: Sequence[Change]) -> tuple[str, ...]:
    """Return what changes cost, one upon the other: of a micro-batch that was halved several times, all of it."""
    sizes = [plan.memory.setup.config.micro_batch_size for plan in (before, after)]
    smaller = {change.cost for change in made if any(key == "micro_batch_size" for key, _ in change.settings)}
    costs = [accumulation_cost(*sizes) if change.cost in smaller else change.cost for change in made]
    return tuple(dict.fromkeys(costs))


_Found = tuple[Plan, str, tuple[Change, ...]]
"""A plan of changes, the file with them, and the changes in the order in which they are made."""


def _search(one: _File, text: str, before: Plan) -> _Found:
    """Return the first single change that makes a job fit, else the fewest of the cheapest one upon the other."""
    for change in _steps(before):
        tried = _tried(one, text, before, change)
        if tried is not None and one.fits(tried[1]):
            return (*tried, (change,))
    plan, content = before, text
    made: tuple[Change, ...] = ()
    for _ in range(MOST_ROUNDS):
        better = next(_better(one, content, plan), None)
        if better is None:
            break
        plan, content, change = better
        made = (*made, change)
        if one.fits(content):
            return _thinned(one, text, before, (plan, content, made))
    return plan, content, made


def _thinned(one: _File, text: str, before: Plan, result: _Found) -> _Found:
    """Return changes that make a job fit without those that it fits without, the dearest of which go first."""
    for change in reversed(result[2][:-1]):
        plan, content = before, text
        fewer = tuple(other for other in result[2] if other is not change)
        for other in fewer:
            tried = _tried(one, content, plan, other)
            if tried is None:
                break
            plan, content = tried
        else:
            result = (plan, content, fewer) if one.fits(content) else result
    return result


def _better(one: _File, content: str, plan: Plan) -> Iterator[tuple[Plan, str, Change]]:
    for change in _steps(plan):
        tried = _tried(one, content, plan, change)
        if tried is not None and one.needs_less(tried[1], content):
            yield (*tried, change)


def _steps(plan: Plan) -> Iterator[Change]:
    """Yield changes that keep what is trained, the cheapest first."""
    setup = plan.memory.setup
    for change in changes(setup.config, setup):
        keys = [key for key, _ in change.settings]
        if not any(key.split(".")[0] in KEPT for key in keys) and is_settable(setup.stack, change.settings):
            yield change


def _tried(one: _File, content: str, plan: Plan, change: Change) -> tuple[Plan, str] | None:
    """Return the plan by share and the text with a change made, or None where the file cannot say it."""
    try:
        for edit in _edits(one, content, plan, change):
            content = spliced(content, one.path, edit)
        return one.by_share(content), content
    except MemplanError:
        return None


def _edits(one: _File, content: str, plan: Plan, change: Change) -> Sequence[Edit]:
    """Return a change as edits of the file's keys, the batch of a step kept by accumulation."""
    config = plan.memory.setup.config
    settings = list(change.settings)
    job = trainer_job(one.files(content), one.options.get("gpus"))
    stack = with_words(plan.memory.setup.stack, job.mapped.writes)
    sizes = [value for key, value in settings if key == "micro_batch_size"]
    total = config.micro_batch_size * config.gradient_accumulation_steps
    if sizes and job.value("let.global_batch_size") is None:
        if total % sizes[0]:
            raise CannotAnswerError(f"{one.path}: a step has {total} sequences, no multiple of {sizes[0]}")
        settings.append(("gradient_accumulation_steps", total // sizes[0]))
    edits, used = [], {key.key: key for key in job.reading.used.values()}
    anchor = next(iter(used), "")
    for own in own_settings(stack, settings):
        result = job.reading.results.get(f"training.{own.setting.partition('=')[0]}")
        said = result is not None and result.rank >= STATED and result.key in used
        key = (
            job.renamed.get(result.key, result.key)
            if said and result is not None and "=" in own.setting
            else own.own_key
        )
        key = own.own_key if key is None or own.own_key in used else key
        value, whole = own.own_value, job.mapped.writes.get("global_batch")
        if key is None and whole and own.setting.startswith("gradient_accumulation_steps="):
            key, value = whole, str(total * config.parallel.data)
        if key is None:
            raise CannotAnswerError(f"{one.path}: {own.setting}: no key of the trainer's says so")
        edits.append(Edit(str(key), str(value), job.renamed.get(anchor, anchor)))
    return edits


def write_back(rewritten: Rewritten) -> Path | None:
    """Write a file's new text, the old one beside it as ``.bak``; return where that is, or None where nothing changed.

    Raises:
        InvalidFileError: It cannot be written; the file is as it was then.
    """
    from memplan.documents.writing import write_file

    if rewritten.after_text == rewritten.before_text:
        return None
    path = usable_path(rewritten.path)
    copy = path.with_name(f"{path.name}.bak")
    write_file(copy, rewritten.before_text)
    write_file(path, rewritten.after_text)
    return copy


WITHIN = 100
"""A plan is of the same job where its requested peak differs by less than one part in so many."""


def suggested(told: CalledJob, requested_bytes: int, device: Device, catalog: Catalog) -> tuple[Suggestion, ...]:
    """Return what to change of a job that does not fit, each with what it saves.

    Raises:
        CannotAnswerError: The job has no plan, or its plan has another peak, so that what it suggests is of another job.
    """
    with TemporaryDirectory(prefix="memplan-run-") as folder:
        (Path(folder) / "config.json").write_text(told.model, encoding="utf-8")
        words = [*told.words, "--model_name_or_path", folder]
        try:
            training = import_file(words).to_dict()["training"]
            config = {"description": "what the script runs", **training, "sequence_length": told.tokens}
            planned = plan(folder, config=config, gpu=device, catalog=catalog)
        except MemplanError as error:
            raise CannotAnswerError(f"this job has no plan ({str(error).splitlines()[0]})") from None
    own = planned.memory.requested_bytes
    if abs(own - requested_bytes) * WITHIN > requested_bytes:
        raise CannotAnswerError(
            f"the plan of what its trainer was given peaks at {own:,} bytes, and the script at {requested_bytes:,}"
        )
    return planned.suggestions
