"""What a process takes of a device outside the allocator, from what the driver says."""

import os

import pytest
import torch

from memplan.host.this_machine import driver_version
from memplan.measure.measure_cuda import context_bytes, used_bytes
from memplan.units import GIB, MIB

DRIVER = """#!/bin/sh
case "$1" in
  --query-gpu=driver_version) printf '{version}' ;;
  --query-gpu=memory.used) echo "{used}" ;;
  --query-compute-apps=*) printf '{apps}' ;;
esac
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * GIB, 12 * GIB))
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(used="", apps="", version=""):
        path = tmp_path / "nvidia-smi"
        path.write_text(DRIVER.format(used=used, apps=apps, version=version).replace("\n", "\n"))
        path.chmod(0o755)

    return install


def test_a_process_that_the_driver_lists_is_counted_alone(driver):
    driver(used="900", apps=f"17, 5000\\n{os.getpid()}, 842\\n")
    assert used_bytes() == 900 * MIB
    assert context_bytes(900 * MIB) == 742 * MIB


@pytest.mark.parametrize("apps", ["", "17, 5000\\n", "[N/A], [N/A]\\n"])
def test_one_that_it_does_not_list_has_what_is_taken_less_what_others_had(driver, apps):
    driver(apps=apps)
    assert context_bytes(1 * GIB) == 1 * GIB - 100 * MIB


def test_without_a_driver_nothing_is_known_of_others(driver):
    assert used_bytes() == 0
    assert context_bytes(0) == 2 * GIB - 100 * MIB


def test_a_driver_that_answers_with_words_is_not_believed(driver):
    driver(used="Unknown Error")
    assert used_bytes() == 0


@pytest.mark.parametrize(
    ("answer", "version"),
    [("580.159.03\\n580.159.03\\n", "580.159.03"), ("", ""), ("[N/A]\\n", ""), ("Failed to initialize NVML\\n", "")],
)
def test_the_version_of_the_driver_is_what_the_driver_says(driver, answer, version):
    assert driver_version() == ""
    driver(version=answer)
    assert driver_version() == version
