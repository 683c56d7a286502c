"""What is read of the configs that take every branch of every family, and of those that ship: shapes and tensors, each as a digest.

Also of the same without one of their keys, and with another value of one: refused in which words, or read as what. That tensors are
right is held by the real implementations. ``pytest tests/golden --update-golden`` rewrites the digests.
"""

import json
from pathlib import Path

import pytest

from memplan.documents.escaping import json_text
from memplan.errors import MemplanError
from memplan.model.families import read_config
from memplan.model.parameter_tensors import inventory_of
from tests.families.test_model_catalog import ENTRIES
from tests.families.tiny import CASES, DEEPSEEK
from tests.golden.test_recorded_jobs import digest

FILE = Path(__file__).with_name("models.json")
CONFIGS = {name: {"model_type": family} | config for name, (family, config) in CASES.items()}
CONFIGS |= {name: {"model_type": one["architecture"]} | one["config"] for name, one in ENTRIES.items()}
CONFIGS |= {
    f"stretched {factor} by {scale}": DEEPSEEK
    | {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": factor, "mscale_all_dim": scale}}
    for factor in (0.5, 1, 1.5, 2, 40)
    for scale in (0, 1.0)
}
PARTS = 4


def changed(value):
    """Return another value of the same kind, or of none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return value[1:] if isinstance(value, str | list) else None


def variants(config):
    """Yield a config, and it without each of its keys, or with another value of every second."""
    yield config
    for number, key in enumerate(config):
        rest = {name: value for name, value in config.items() if name != key}
        yield rest
        if number % 2:
            yield rest | {key: changed(config[key])}


def read(config) -> str:
    """Return what a config is read as, or why it is not."""
    try:
        spec, notes = read_config(config, "model", "config.json")
        return repr((spec, notes, inventory_of(spec)))
    except MemplanError as error:
        return str(error)


@pytest.mark.parametrize("part", range(PARTS))
def test_configs_are_read_as_they_were(part, request):
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in [*CONFIGS][part::PARTS]:
        found = digest([*map(read, variants(CONFIGS[name]))])
        if request.config.getoption("--update-golden"):
            known[name] = found
        assert found == known.get(name), name
    if request.config.getoption("--update-golden"):
        FILE.write_text(json_text({name: known[name] for name in CONFIGS if name in known}, indent=0), encoding="utf-8")
