"""Torch's out-of-memory messages, of every wording that there has been, and what is said of them."""

import json
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import memplan
from memplan.cli.main import make_app
from memplan.failure.out_of_memory_message import read_message
from memplan.report.json_schemas import schema_of
from memplan.units import GIB, MIB, parse_bytes
from tests.jobs import follow_schema

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of 23.65 GiB of which "
    "{free} is free. {processes}Of the allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)
OWN = "Including non-PyTorch memory, this process has {} memory in use. "


def new(tried="1.00 GiB", free="0.15 GiB", own="23.50 GiB", allocated="22.90 GiB", unallocated="0.10 GiB", others=""):
    return NEW.format(
        tried=tried,
        free=free,
        processes=others + (OWN.format(own) if own else ""),
        allocated=allocated,
        unallocated=unallocated,
    )


OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total capacity; 8.57 MiB already allocated; "
    "9.28 GiB free; 4.68 MiB cached)"
)
SINCE_1_6 = (
    "CUDA out of memory. Tried to allocate 2.26 GiB (GPU 0; 6.00 GiB total capacity; 781.59 MiB already allocated; 3.03 GiB "
    "free; 1.24 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)


def test_every_figure_of_a_message_is_read():
    said = read_message(new(others="Process 77 has 512.00 MiB memory in use. "), "log")
    assert (said.tried, said.capacity, said.free) == (GIB, parse_bytes("23.65 GiB"), parse_bytes("0.15 GiB"))
    assert (said.allocated, said.unallocated) == (parse_bytes("22.90 GiB"), parse_bytes("0.10 GiB"))
    assert said.own == parse_bytes("23.50 GiB")
    assert said.others == 512 * MIB
    assert said.outside == said.own - said.allocated - said.unallocated


@pytest.mark.parametrize(
    ("text", "tried", "unallocated"), [(OLD, "12.50 MiB", None), (SINCE_1_6, "2.26 GiB", "1.24 GiB")]
)
def test_older_wordings_are_read(text, tried, unallocated):
    said = read_message(text, "log")
    assert said.tried == parse_bytes(tried)
    if unallocated:
        assert said.unallocated == parse_bytes(unallocated) - said.allocated


def test_a_misspelt_capacity_zero_bytes_and_other_vendors_are_read():
    text = new(free="0 bytes").replace("capacity", "capacty").replace("CUDA", "HIP")
    assert read_message(text, "log").free == 0


def test_line_breaks_within_the_message_do_not_matter():
    assert read_message(new().replace(" ", "\n"), "log") == read_message(new(), "log")


def test_colours_within_the_message_do_not_matter():
    assert read_message(re.sub(r"([0-9.]+) GiB", "\x1b[1;36m\\1\x1b[0m GiB", new()), "log") == read_message(
        new(), "log"
    )


def test_this_process_is_told_from_others_by_what_it_holds():
    text = new(own="", others="Process 1 has 1.46 GiB memory in use. Process 2 has 23.30 GiB memory in use. ")
    said = read_message(text, "log")
    assert (said.own, said.others) == (parse_bytes("23.30 GiB"), parse_bytes("1.46 GiB"))


def test_the_last_message_of_a_log_counts():
    assert read_message(new(tried="1.00 GiB") + "\nagain\n" + new(tried="2.00 GiB"), "log").tried == 2 * GIB


@pytest.mark.parametrize(
    ("trace", "phase"),
    [
        ("  File 'a.py', line 3\n    loss.backward()", "backward"),
        ("    optimizer.step()\n  File 'torch/optim/adamw.py'", "optimizer step"),
        ("    return self._call_impl(*args)\n  File 'm.py', line 2, in forward", "forward"),
        ("    model = AutoModel.from_pretrained(name)", "loading"),
        ("    nothing that is known", "unknown"),
    ],
)
def test_the_traceback_tells_the_phase(trace, phase):
    text = f"Traceback (most recent call last):\n{trace}\n{new()}"
    assert read_message(text, "log").phase == phase


def test_the_progress_bar_tells_the_step():
    assert read_message(f"  1%|  | 7/1000 [00:05<27:41]Traceback\n{new()}", "log").step == 7
    assert read_message(f"shards: 2/3\n{new()}", "log").step is None


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (new(tried="30.00 GiB"), "one allocation"),
        (new(tried="1.00 GiB", unallocated="2.00 GiB", allocated="21.00 GiB"), "fragmentation"),
        (
            new(own="20.00 GiB", allocated="19.00 GiB", others="Process 5 has 3.50 GiB memory in use. "),
            "other processes",
        ),
        (new(), "the job"),
        (new(tried="0.10 GiB").replace("Of the allocated", "20.00 GiB allowed; Of the allocated"), "a limit"),
    ],
)
def test_the_cause_is_the_simplest_that_explains_it(message, cause):
    assert memplan.why(message=message).cause == cause


def test_a_job_that_does_not_fit_is_told_its_instant_and_what_to_change():
    text = f"  0%|  | 0/1000 [00:00<?]Traceback\n  loss.backward()\n{new(allocated='22.64 GiB')}"
    answer = memplan.why("llama-8b", config="bf16-adamw", message=text).to_dict()
    assert answer["cause"] == "the job"
    assert answer["plan"]["verdict"] == "no"
    assert answer["plan"]["states_missing_bytes"] > 20 * GIB
    assert answer["plan"]["changes"]


def test_a_run_that_needs_more_than_its_plan_is_told_so():
    answer = memplan.why("llama-3.2-1b", config="lora", message=new(), sequence_length=128).to_dict()
    assert answer["plan"]["beyond_bytes"] > 10 * GIB


def test_the_answer_matches_its_schema():
    for model in (None, "llama-3.2-1b"):
        follow_schema(memplan.why(model, message=new()).to_dict(), schema_of("why"))


@pytest.mark.parametrize("capacity", ["0 bytes", "1.00 GiB"])
def test_figures_that_contradict_each_other_are_refused(capacity):
    with pytest.raises(
        memplan.MemplanError, match=f"contradicts itself: 2.00 GiB free, of a capacity of {capacity[0]}"
    ):
        read_message(new(free="2.00 GiB").replace("23.65 GiB", capacity), "log")


def test_a_driver_that_pages_to_the_host_gives_more_than_the_capacity():
    """As of https://github.com/YingqianWang/iPASSR/issues/9, on Windows."""
    said = read_message(SINCE_1_6.replace("781.59 MiB", "17.20 GiB").replace("1.24 GiB", "19.15 GiB"), "log")
    assert said.allocated > said.capacity


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (4.36 GiB).",
            "4.36 GiB left for the cache, and one sequence of 131072 tokens takes 16.00 GiB",
        ),
        (
            "max seq len (4096) is larger than the maximum number of tokens that can be stored in KV cache (3664).",
            "set it to 3664",
        ),
        ("No available memory for the cache blocks. Try increasing", "no memory left for its cache"),
        (
            "Free memory on device cuda:0 (20.5/23.65 GiB) on startup is less than desired GPU memory utilization (0.9, 21.29 GiB)",
            "20.5 of 23.65 GiB are free",
        ),
        ("allocating 16384.00 MiB on device 0: cudaMalloc failed: out of memory", "llama.cpp asked for one buffer"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate", "this is XLA's"),
        ("ncclUnhandledCudaError: ... Last error:\nCuda failure 2 'out of memory'", "NCCL had no room"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "a library of CUDA"),
        ("torch.AcceleratorError: CUDA error: out of memory", "the driver had no memory"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", "the host's memory ran out"),
        ("epoch 1\nKilled\n", "the system ended the process"),
    ],
)
def test_messages_of_other_programs_are_told_apart(text, said):
    with pytest.raises(memplan.errors.CannotAnswerError, match=re.escape(said)):
        memplan.why(message=text)


def test_metals_message_is_read():
    """As in https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/mps/MPSAllocator.mm."""
    text = "MPS backend out of memory (MPS allocated: 16.20 GB, other allocations: 613.56 MB, max allowed: 18.13 GB). "
    said = read_message(f"{text}Tried to allocate 2.00 GB on private pool.", "log")
    assert (said.tried, said.capacity, said.allocated) == (2 * GIB, parse_bytes("18.13 GiB"), parse_bytes("16.20 GiB"))
    assert said.outside == parse_bytes("613.56 MiB")


def test_the_first_line_says_the_cause():
    assert memplan.why(message=new()).document().blocks[0].startswith("THE JOB: ")


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused_in_a_line(text):
    for log in (text, f"CUDA out of memory. Tried to allocate {text}", new(tried="1.00 GiB", free=text)):
        with suppress(memplan.MemplanError):
            read_message(log, "log")


def test_a_log_that_powershell_wrote_is_read(tmp_path):
    (tmp_path / "run.log").write_text(f"step 1\r\n{new()}\r\n", encoding="utf-16")
    assert memplan.why(file=tmp_path / "run.log").to_dict() == memplan.why(message=new()).to_dict()


def test_the_command_reads_standard_input_and_files(tmp_path):
    log = tmp_path / "train.log"
    log.write_bytes(b"\xff\xfe noise\n" + new().encode())
    runner = CliRunner()
    app = make_app(["why", "fit"])
    assert json.loads(runner.invoke(app, ["why", "--json", "--message", str(log)]).stdout)["cause"] == "the job"
    assert json.loads(runner.invoke(app, ["why", "--json", str(log)]).stdout)["cause"] == "the job"
    assert json.loads(runner.invoke(app, ["why", "--json"], input=new()).stdout)["cause"] == "the job"
    assert runner.invoke(app, ["why"], input="nothing of the kind").exception.exit_code == 2
