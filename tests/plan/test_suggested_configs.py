"""What is recommended for a GPU follows from the catalog and the records, and what is unknown is named."""

import pytest

from memplan.documents.printed_numbers import Records
from memplan.library.lookup import Overrides, catalog_model, find_setup
from memplan.plan.memory_plan import Device
from memplan.plan.suggested.suggested_configs import SOUND, suggested_configs
from memplan.report.json_schemas import schema_of
from memplan.report.plans.recommend_answer import precision_text
from tests.jobs import follow_schema

GPUS = ("rtx3060", "rtx4090", "a100-sxm-80gb", "h100-sxm-80gb", "m2-max-96gb")


@pytest.fixture(scope="module")
def answered(catalog):
    names = [name for name, config in catalog.configs.entries.items() if config.adapter is None]
    setups = [find_setup(name, Overrides(None, None, None, ()), catalog) for name in names]
    models = [(name, catalog_model(name, catalog)) for name in catalog.models]
    devices = [Device(catalog.gpus[name], name) for name in GPUS]
    records = Records(catalog.root)
    verdicts = {setup.name: records.verdict(setup.config.evidence) for setup in setups}
    return setups, verdicts, dict(zip(GPUS, suggested_configs(models, setups, devices, records.verdict), strict=True))


def test_what_is_established_is_proven_or_works(answered):
    _, _, found = answered
    for row in found.values():
        assert row.established is not None
        assert row.established.setup.config.status in ("proven", "works")


def test_an_experiment_holds_a_larger_model_and_its_record_is_sound(answered):
    _, verdicts, found = answered
    shown = [row for row in found.values() if row.experimental is not None]
    assert shown
    for row in shown:
        assert row.experimental.largest_fitting_parameters > row.established.largest_fitting_parameters
        assert row.experimental.setup.config.status == "experimental"
        assert verdicts[row.experimental.setup.name] in SOUND


def test_a_config_that_diverges_or_is_far_behind_is_never_recommended(answered, catalog):
    setups, verdicts, found = answered
    bad = {setup.name for setup in setups if verdicts.get(setup.name) in ("behind", "far behind", "diverges")}
    assert bad
    names = {row.experimental.setup.name for row in found.values() if row.experimental is not None}
    assert not names & bad


def test_nothing_larger_that_is_allowed_fits(answered, catalog):
    _, _, found = answered
    row = found["rtx4090"]
    largest = row.established.largest_fitting_parameters
    from memplan.plan.sizes.largest_model import largest_models

    for name in ("fp32-adamw", "mixed-adamw", "bf16-adamw", "muon"):
        setup = find_setup(name, Overrides(None, None, None, ()), catalog)
        models = [(model, catalog_model(model, catalog)) for model in catalog.models]
        assert largest_models(models, setup, [row.device])[0].largest_fitting_parameters <= largest


def test_newton_schulz_runs_in_bf16_where_there_is_bf16_and_narrower_is_only_on_paper(answered):
    _, _, found = answered
    assert {name: row.precision for name, row in found.items()} == {
        "rtx3060": "bf16",
        "rtx4090": "bf16",
        "a100-sxm-80gb": "bf16",
        "h100-sxm-80gb": "bf16",
        "m2-max-96gb": "fp16",
    }
    assert [name for name, _ in found["a100-sxm-80gb"].faster] == ["int8"]
    assert [name for name, _ in found["h100-sxm-80gb"].faster] == ["fp8", "int8"]


TIMES = {"bf16": 0.003, "fp32": 0.04, "int8-native": 0.03}


def test_what_was_measured_on_a_gpu_is_said_with_the_card():
    row = {"iterations": 5, "rows": 64}
    timed = [{**row, "precision": name, "seconds": {"low": low}} for name, low in TIMES.items()]
    text = precision_text(None, {"machine": "Some GPU, 1 GPU", "rows": timed})
    assert (
        "On one Some GPU five iterations at 64 x 64 take 3.0 ms in bf16, 40.0 ms in fp32, and 30.0 ms with X X^T"
        in text
    )


def test_what_is_open_is_said_with_what_the_command_times():
    assert "has not been measured" in precision_text(None)
    assert "memplan lab precision --device cuda" in precision_text(None)


def test_the_command_answers_for_one_gpu_and_for_all(cli):
    one = cli("recommend", "--gpu", "rtx4090")
    assert one.exit_code == 0
    assert "bf16-adamw-8bit (learning: works)" in one.out
    data = cli("recommend", "--gpu", "h100", "--json").data
    follow_schema(data, schema_of("recommend"))
    assert data["rows"][0]["measured"] is False
