"""Setups from keys of a config, and models by name: of made-up shapes, or of the catalog."""

from collections.abc import Callable
from typing import Any

import pytest

from memplan.catalog.training_config import TrainingConfig
from memplan.model.families import model_spec
from memplan.model.model import Model
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup
from tests.jobs import SHAPES, shipped_catalog, shrunk_model

MakeSetup = Callable[..., TrainingSetup]
MakeModel = Callable[[str], Model]


@pytest.fixture(scope="session")
def make_setup() -> MakeSetup:
    def made(**keys: Any) -> TrainingSetup:
        return resolve(TrainingConfig("test", **keys), shipped_catalog(), "test")

    return made


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    def made(name: str) -> Model:
        if name in SHAPES:
            return SHAPES[name]
        entry = shipped_catalog().models[name]
        spec = model_spec({"model_type": entry.architecture, **entry.config}, name, "test")
        return Model.from_spec(spec, "test")

    return made


@pytest.fixture(scope="session")
def shrunk() -> Callable[[Model], Model]:
    return shrunk_model
