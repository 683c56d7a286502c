"""A trainer's own files: ``memplan.import_file``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memplan.catalog.catalog import Catalog
from memplan.documents.opening import usable_path
from memplan.errors import InvalidFileError
from memplan.importer.files.file_sources import read_keys
from memplan.importer.finished_job import finish
from memplan.importer.given_job import import_commands, import_files
from memplan.importer.imported_job import ImportedJob, Question
from memplan.importer.sources.argument_vectors import command_line
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.job_options import LIMITS, number_problems
from memplan.library.lookup.trainer_files import trainer_mappings
from memplan.report.document import Document
from memplan.report.trainers.trainer_file_answers import KnownModel, import_document


@dataclass(frozen=True, repr=False, eq=False)
class Imported(Answer):
    """What a trainer's files say.

    Attributes:
        job: What was read of them.
        model: The model that they name.
    """

    job: ImportedJob
    model: KnownModel

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan import``, which has no bytes and no verdict."""
        return import_document(self.job, self.model)


@checked
def import_file(
    file: str | Path | Sequence[str],
    *,
    beside: Sequence[str | Path] = (),
    gpus: int | None = None,
    trainer: str | None = None,
    trainer_version: str | None = None,
    catalog: Catalog | None = None,
) -> Imported:
    """Return what a trainer's own file says of a training job, in memplan's keys.

    Args:
        file: The file; or a launch command as a list of words.
        beside: Files that go with it: an accelerate YAML, a DeepSpeed JSON.
        gpus: GPUs that share the job.
        trainer: Whose file it is, where its keys do not tell.
        trainer_version: The version of that trainer.
        catalog: Where the model's name is looked up.

    Raises:
        InvalidFileError: It cannot be read, or is no trainer's.
        UnknownNameError: No trainer has the name given.

    Example:
        >>> import memplan
        >>> words = ["trl", "sft", "--model_name_or_path", "Qwen/Qwen2.5-7B", "--per_device_train_batch_size", "2"]
        >>> memplan.import_file(words).to_dict()["training"]["micro_batch_size"]
        2
    """
    if problems := number_problems({"gpus": gpus}, LIMITS):
        raise InvalidFileError(problems)
    question = Question(trainer_mappings(), gpus, trainer, trainer_version or "")
    others = [usable_path(path) for path in beside]
    if isinstance(file, str | Path):
        job = import_files([usable_path(file), *others], question)
    else:
        job = import_commands([command_line(list(file))], question, [read_keys(path) for path in others])
    given = job.value("model.given")
    built = job.value("model.model_type") is not None  # the trainer's own, whose shapes are said
    named = known_model(given, None if built else catalog)
    job = finish(job)
    if catalog is not None and job.refused_for_experts and named.name and named.name in catalog.models.entries:
        from memplan.library.lookup.model_lookup import catalog_model

        if not catalog_model(named.name, catalog).has_experts:
            job.leave_experts_out()
    return Imported(job, named)


def known_model(given: str | None, catalog: Catalog | None) -> KnownModel:
    """Return what a model's name in a trainer's file stands for."""
    if given is None or catalog is None:
        return KnownModel(given)
    from memplan.errors import MemplanError
    from memplan.library.lookup.model_names import resolve_model_name

    try:
        result = resolve_model_name(given, catalog, elsewhere=True)
    except MemplanError as error:
        return KnownModel(given, note=str(error))
    return KnownModel(given, str(result.target), result.how, " ".join(result.notes))
