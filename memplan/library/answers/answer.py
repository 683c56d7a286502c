"""What every answer can do: print itself in a line, as JSON, and in a notebook."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.documents.escaping import json_text
from memplan.errors import CannotAnswerError, escaped
from memplan.report.document import Document, Table

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.figure import Figure


class Answer(ABC):
    """The answer to a question, as a value and as a document."""

    @abstractmethod
    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer as tables, sentences and JSON, as the command prints it.

        Args:
            unit: Unit of bytes in tables; nothing for the one that suits each figure.
            strict: TIGHT counts as NO.
            full: Whether the JSON is wanted too, which has the hash of the catalog.
        """

    def figure(self) -> Figure:
        """Return the answer as a picture.

        Raises:
            CannotAnswerError: It has none.
        """
        raise CannotAnswerError(f"{type(self).__name__}: this answer has no picture")

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the answer to a file that ends in ``.svg`` or ``.png``.

        Raises:
            InvalidFileError: The name ends in something else, or the file cannot be written.
            CannotAnswerError: matplotlib is missing, or the answer has no picture.
        """
        from memplan.report.figures import check_drawable, save_figure

        check_drawable(Path(path))
        save_figure(self.figure(), Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Return exactly what the command prints with ``--json``."""
        data: dict[str, Any] = json.loads(json_text(self.document().data))
        return data

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        blocks = [block for block in self.document(full=False).blocks if block and not isinstance(block, Table)]
        last = blocks[-1]
        return last if isinstance(last, str) else last[-1]

    def __repr__(self) -> str:
        return f"<memplan.{type(self).__name__}: {escaped(self.sentence)}>"

    def _repr_html_(self) -> str:
        from memplan.library.answers.notebook import document_html

        return document_html(self.document(full=False))
