"""Answers that many plans stand behind take no longer than what is asked for needs."""

import pytest

import memplan
from memplan.errors import InvalidFileError
from memplan.library.lookup import config_lookup
from memplan.library.several import config_rows
from memplan.plan.reserve import simulated_run, simulation
from memplan.plan.reserve.simulated_run import Simulation


def test_of_a_model_that_no_card_has_room_for_nothing_is_simulated(cli, monkeypatch):
    simulated = []
    monkeypatch.setattr(config_rows, "simulated", lambda plan, **_: simulated.append(plan) or plan)
    monkeypatch.setattr(config_rows, "at_a_glance", lambda plan: simulated.append(plan) or plan)
    assert cli("fit", "llama-405b", "--gpu", "rtx4090").exit_code == 1
    assert not simulated


def test_a_setting_is_read_once_for_all_configs(cli, monkeypatch):
    texts = []
    parse = config_lookup.parse_document
    monkeypatch.setattr(config_lookup, "parse_document", lambda text, name: texts.append(text) or parse(text, name))
    assert cli("fit", "gpt2", "--gpu", "h100", "--set", "reserve=77 MiB").exit_code == 0
    assert texts.count("77 MiB") == 1


def test_more_plans_than_anyone_reads_side_by_side_are_refused():
    with pytest.raises(InvalidFileError, match="at most 32 plans, of a config on a GPU each, got 34"):
        memplan.compare("gpt2", ["lora"] * 17, on=["h100", "a100"])


def test_where_plays_counts_that_do_not_fit_no_further_than_it_takes_to_know(monkeypatch):
    """The answer is the same as if all were played to their end."""
    ended, real = [], Simulation._played

    def played(run, capacity_bytes=None, **ways):
        peaks = real(run, capacity_bytes, **ways)
        ended.append(peaks.survives)
        return peaks

    monkeypatch.setattr(Simulation, "_played", played)
    monkeypatch.setattr(simulated_run, "FURTHER_SHARE", 10**9)
    counts = memplan.where("llama-8b", gpu="rtx4090", sequence_length=1100).counts
    assert not all(ended)
    monkeypatch.setattr(simulation, "_surely_exceeds", lambda *_: False)
    ended.clear()
    assert memplan.where("llama-8b", gpu="rtx4090", sequence_length=1100).counts == counts
    assert all(ended)
