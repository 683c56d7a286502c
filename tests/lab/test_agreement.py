"""The formula says what the trace says, on every configuration of the grid."""

from dataclasses import replace

import pytest

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, TrainingConfig
from memplan.model.families import with_towers
from tests.jobs import shipped_catalog
from tests.survey.agreement import compare, cut_model, grid
from tests.survey.drawn_models import NOT_BUNDLED

pytestmark = pytest.mark.thorough

CATALOG = shipped_catalog()
GRID = list(grid(CATALOG))

TOLERANCE = 0.001
"""Of the requested peak. Few configurations need it: chunked losses whose last chunk is smaller
(the formula takes all chunks for equal), and the scores of sinks under adapters."""

EXACT = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Dense families of the Llama kind: the peak is equal to the byte."""


def test_the_grid_is_large_and_covers_every_family():
    assert len(GRID) >= 200
    families = {entry.architecture for entry in CATALOG.models.entries.values()} - {*with_towers(), *NOT_BUNDLED}
    assert {model.spec.architecture for _, model, _ in GRID} == families


@pytest.mark.parametrize(("name", "model", "config"), GRID, ids=[name for name, _, _ in GRID])
@pytest.mark.one_in(10)
def test_formula_equals_trace(name, model, config):
    found = compare(name, model, config, CATALOG)
    assert abs(found.difference_bytes) <= TOLERANCE * found.traced_bytes, dict(found.differences)
    if found.family in EXACT:
        assert found.difference_bytes == 0, dict(found.differences)
    if config.offload.optimizer_states == "cpu":
        assert found.differences.keys() <= ({"forward"} if name.endswith("codes") else set())


@pytest.mark.parametrize("attention", ["flash", "math", "efficient"])
def test_dropout_inside_attention_is_the_formulas_too(attention):
    """GPT-2 trains with dropout; the math kernel keeps what is dropped in fp32, and a mask."""
    config = TrainingConfig("", micro_batch_size=2, sequence_length=256, kernels=Kernels(attention=attention))
    assert compare("dropout", cut_model("gpt2", CATALOG), config, CATALOG).difference_bytes == 0


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen3-0.6b", {"adapter": Adapter()}),
        ("smollm2-135m", {"adapter": Adapter(), "activation_checkpointing": "full"}),
        ("olmo-1b", {"adapter": Adapter()}),
    ],
)
def test_a_frozen_head_under_a_chunked_loss_keeps_no_gradient(name, keys):
    config = replace(TrainingConfig("", sequence_length=900, kernels=Kernels(loss="chunked")), **keys)
    assert compare("frozen head", cut_model(name, CATALOG), config, CATALOG).difference_bytes == 0
