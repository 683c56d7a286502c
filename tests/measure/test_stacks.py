"""Libraries' own loops really run: transformers, PEFT and bitsandbytes train on the CPU what the plan is of."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("bitsandbytes")

from memplan.measure.process import cuda_is_usable
from tests.survey.stacks import measured_jobs
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.stack_records import read_records

RECORDS = Path(__file__).parent.parent / "stacks" / "records"
FEW_BYTES, MOST_HIDDEN, MOST_TOKENS = 6 * 10**8, 400, 200
SHARE = 0.005
"""Of the requested peak: on the CPU softmax takes no copy for its gradient, and attention is not fused, which layers alone show."""


def small_job(stack: str, method: str, family: str) -> StackJob:
    """Return the first recorded job of a kind that a CPU trains in seconds, on widths that its kernels take."""
    _, records = read_records(RECORDS / f"{stack}.json")
    jobs = (StackJob.read(record.job) for record in records if record.peak_bytes < FEW_BYTES)
    return next(job for job in jobs if (job.method, job.family) == (method, family) and _is_narrow(job))


def _is_narrow(job: StackJob) -> bool:
    model, training = job.job.model, job.job.training
    return model["hidden_size"] <= MOST_HIDDEN and training["sequence_length"] <= MOST_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "method", "family"),
    [("plain-loop", "full", "gpt_neox"), ("plain-loop", "nf4", "qwen2_moe"), ("transformers", "lora", "gpt_neox")],
)
def test_what_is_planned_is_what_the_library_takes(stack, method, family, capsys, tmp_path):
    job, path = small_job(stack, method, family), tmp_path / "record.json"
    assert measured_jobs.main(["--device", "cpu", "--job", job.text, "--record", str(path)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    share = line.partition("requested ")[2].split("%")[0]
    assert abs(float(share)) <= 100 * SHARE, line
    assert path.is_file()


def test_a_job_that_is_refused_is_said_and_not_run(capsys):
    job = small_job("plain-loop", "full", "gpt_neox").text.replace('"adamw-fp32"', '"adamw-fp23"')
    assert measured_jobs.main(["--device", "cpu", "--job", job]) == 1
    said = capsys.readouterr()
    assert "0 jobs" in said.out
    assert "adamw-fp23" in said.err


@pytest.mark.parametrize(
    ("words", "said"), [(["--device", "cpu", "--most", "80"], "--most"), (["--device", "tpu"], "--device")]
)
def test_options_out_of_range_are_refused_before_anything_runs(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        measured_jobs.main(words)
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(cuda_is_usable(), reason="needs a machine without CUDA")
def test_a_machine_without_a_gpu_is_said_in_a_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        measured_jobs.main(["--jobs", "1"])
    assert "--device cpu" in capsys.readouterr().err.splitlines()[-1]
