"""What becomes of settings that were drawn at random, until few of them reached a line that no other had: refused in which words,
or resolved to what.

``pytest tests/golden --update-golden`` rewrites the answers.
"""

import json
from pathlib import Path

import pytest

from memplan.catalog.catalog import data_directory
from memplan.errors import MemplanError
from memplan.library.lookup import Overrides, catalog_model, find_setup
from memplan.training.adapters import adapter_tensors
from memplan.training.own_settings import own_settings
from memplan.training.resolution.resolved_keys import resolved_keys
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.half_precision import fp16_settings
from memplan.training.stack_models import built_by, with_model_built
from tests.golden.test_recorded_jobs import digest

FILE = Path(__file__).with_name("drawn_settings.json")
DRAWN = json.loads(FILE.read_text(encoding="utf-8"))
MODELS = tuple(dict.fromkeys(one["model"] for one in DRAWN))
PROPERTIES = tuple(name for name, value in vars(TrainingSetup).items() if isinstance(value, property))


def known_of(setup):
    """Return what a setup says of itself; of adapters and completions where it has some."""
    for name in PROPERTIES:
        try:
            yield name, getattr(setup, name)
        except AssertionError:
            continue


def anywhere(text: str) -> str:
    """Return a text without the folder that the catalog lies in."""
    return text.replace(f"{data_directory()}/", "")


def answer_to(drawn, catalog) -> str:
    """Return why settings are refused, or a digest of what they are resolved to and of what trains."""
    released, count = catalog_model(drawn["model"], catalog), drawn["gpus"]
    overrides = Overrides(settings=tuple(drawn["set"]), gpus=count, counted=count > 1, stack=drawn["stack"])
    try:
        setup = find_setup(drawn["config"], overrides, catalog, released)
        model = built_by(released, setup)
        setup = with_model_built(setup, model, released)
        tensors = (*model.inventory, *adapter_tensors(model, setup))
    except MemplanError as error:
        return anywhere(f"refused: {error}")
    settings = [*fp16_settings(setup.config, catalog), ("micro_batch_size", 1), ("activation_checkpointing", "full")]
    said = resolved_keys(setup), setup.format_names, setup.optimizer_names, setup.unmodelled, model.notes
    return digest(anywhere(repr((said, [*known_of(setup)], tensors, own_settings(setup.stack, settings)))))


@pytest.mark.parametrize("name", MODELS)
def test_settings_are_resolved_or_refused_as_they_were(name, catalog, request):
    for drawn in DRAWN:
        if drawn["model"] == name:
            found = answer_to(drawn, catalog)
            if request.config.getoption("--update-golden"):
                drawn["answer"] = found
            assert found == drawn["answer"], drawn
    if request.config.getoption("--update-golden"):
        FILE.write_text("\n".join(["[", ",\n".join(json.dumps(one) for one in DRAWN), "]", ""]), encoding="utf-8")
