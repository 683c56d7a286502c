"""Which document ``memplan show NAME`` means: an entry of some kind, or a model from anywhere."""

from memplan.catalog.catalog import SECTIONS, Catalog
from memplan.catalog.stack_versions import split_name
from memplan.documents.opening import usable_path
from memplan.errors import CannotAnswerError, UnknownNameError, match_hint
from memplan.library.lookup import Shapes, find_model
from memplan.report.catalog_answer import entry_document, model_document, stored_document
from memplan.report.document import Document

KINDS = ("gpus", "configs", "stacks", "optimizers", "formats", "gradients")


def show_document(name: str, catalog: Catalog, unit: str) -> Document:
    """Return what there is to know under a name.

    Raises:
        UnknownNameError: No entry of any kind and no file has the name.
    """
    plain = not name.startswith((".", "/", "~")) and name != "-"
    kinds = [kind for kind in KINDS if plain and name in catalog.section(kind)]
    if plain and "@" in name and split_name(name)[0] in catalog.stacks:
        kinds = ["stacks"]
    if kinds:
        return entry_document(kinds, name, catalog, unit)
    try:
        return model_document(find_model(name, Shapes(), catalog), unit)
    except UnknownNameError:
        known = [entry for kind in SECTIONS for entry in catalog.section(kind)]
        unknown = UnknownNameError(
            f"unknown name {name[:80]!r}{match_hint(name, known)} (see: memplan list {'|'.join(SECTIONS)})"
        )
        raise unknown from None
    except CannotAnswerError:
        if not name.endswith(".safetensors"):
            raise
        from memplan.model.readers.safetensors import stored_tensors

        return stored_document(name, stored_tensors(usable_path(name)), unit)
