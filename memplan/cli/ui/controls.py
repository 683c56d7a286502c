"""The page's controls: names to choose from, numbers to type or to slide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import get_args

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import Checkpointing
from memplan.cli.ui.question import MOST_GPUS, PRECISIONS, Question
from memplan.report.page.elements import text

OWN = "as the method has it"
SLIDERS = {"batch": ("Micro-batch", 0, 8), "length": ("Sequence length", 7, 17)}
"""Field -> its label, and the powers of two that its slider goes from and to."""


def form(question: Question, catalog: Catalog) -> str:
    """Return the controls, set to a question."""
    given = {key: str(value) for key, value in asdict(question).items()}
    choices = (
        ("model", "Model", catalog.models, ""),
        ("gpu", "GPU", catalog.gpus, ""),
        ("config", "Method", catalog.configs, ""),
        ("stack", "Training library", catalog.stacks, OWN),
        ("precision", "Precision", PRECISIONS, OWN),
        ("checkpointing", "Checkpointing", get_args(Checkpointing), OWN),
    )
    fields = [_choice(name, label, options, given[name], none) for name, label, options, none in choices]
    fields.append(
        _field(
            "gpus",
            "GPUs",
            f'<input type="number" id="gpus" name="gpus" min="1" max="{MOST_GPUS}" value="{given["gpus"]}">',
        )
    )
    fields += [_slider(name, *of, int(given[name])) for name, of in SLIDERS.items()]
    return (
        f'<form id="controls" aria-label="The job">{"".join(fields)}</form>'
        '<p id="refused" role="alert"></p><p id="said" role="status" class="unseen"></p>'
    )


def _field(name: str, label: str, control: str) -> str:
    return f'<div class="field"><label for="{name}">{label}</label>{control}</div>'


def _choice(name: str, label: str, options: Iterable[str], chosen: str, none: str) -> str:
    listed = [("", none)] if none else []
    listed += [(option, option) for option in options]
    shown = "".join(
        f'<option value="{text(value)}"{" selected" if value == chosen else ""}>{text(word)}</option>'
        for value, word in listed
    )
    return _field(name, label, f'<select id="{name}" name="{name}">{shown}</select>')


def _slider(name: str, label: str, first: int, last: int, value: int) -> str:
    power = min(last, max(first, value.bit_length() - 1))
    return (
        f'<div class="field wide"><label for="{name}">{label}</label><div class="pair">'
        f'<input type="number" id="{name}" name="{name}" min="1" value="{value}">'
        f'<input type="range" data-power-of="{name}" aria-label="{label}, in powers of two" min="{first}" max="{last}" value="{power}"></div></div>'
    )
