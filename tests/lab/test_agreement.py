"""The formula says what the trace says, on every configuration of the grid."""

import pytest

from memplan.catalog.catalog import Catalog, data_directory
from memplan.lab.agreement import compare, grid

CATALOG = Catalog(data_directory())
GRID = list(grid(CATALOG))

TOLERANCE = 0.001
"""Of the requested peak. Few configurations need it: chunked losses whose last chunk is smaller
(the formula takes all chunks for equal), and the scores of sinks under adapters."""

EXACT = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Dense families of the Llama kind: the peak is equal to the byte."""


def test_the_grid_is_large_and_covers_every_family():
    assert len(GRID) >= 200
    families = {entry.architecture for entry in CATALOG.models.entries.values()}
    assert {model.spec.architecture for _, model, _ in GRID} == families


@pytest.mark.parametrize(("name", "model", "config"), GRID, ids=[name for name, _, _ in GRID])
def test_formula_equals_trace(name, model, config):
    found = compare(name, model, config, CATALOG)
    assert abs(found.difference_bytes) <= TOLERANCE * found.traced_bytes, dict(found.differences)
    if found.family in EXACT:
        assert found.difference_bytes == 0, dict(found.differences)
    if config.offload.optimizer_states == "cpu":
        assert found.differences.keys() <= ({"forward"} if name.endswith("codes") else set())
