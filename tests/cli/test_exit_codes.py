"""Exit codes are API: 0 yes, 1 no, 2 bad input, 3 cannot answer, 70 a bug of ours."""

import pytest

from memplan.library.lookup import custom_gpu
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated

pytestmark = pytest.mark.usefixtures("answered_once")

ASK = ("fit", "pythia-160m", "--config", "bf16-adamw")


def test_a_job_that_fits_exits_with_0(cli):
    ran = cli(*ASK, "--gpu", "h100")
    assert ran.exit_code == 0
    assert ran.out.startswith("FITS  ")


def test_a_job_that_does_not_fit_exits_with_1(cli):
    ran = cli("fit", "llama-70b", "--gpu", "t4", "--config", "bf16-adamw")
    assert ran.exit_code == 1
    assert ran.out.startswith("NO  ")


@pytest.fixture
def between(model, setup_of) -> str:
    """A size of memory between the expected and the upper total of the job."""
    plan = CompiledPlan(model("pythia-160m"), setup_of("bf16-adamw"))
    found = simulated(plan.evaluate(Device(custom_gpu(2**36, "64 GiB"), "any")))
    return f"{(found.device_bytes + found.upper_bytes) // 2} bytes"


def test_a_tight_job_exits_with_0_and_with_1_under_strict(cli, between):
    loose = cli(*ASK, "--gpu-memory", between)
    strict = cli(*ASK, "--gpu-memory", between, "--strict")
    assert (loose.exit_code, strict.exit_code) == (0, 1)
    assert loose.out.startswith("TIGHT  ")
    assert cli(*ASK, "--gpu-memory", between, "--json").data["verdict"] == "tight"


EVEN = ("fit", "qwen2.5-0.5b", "--config", "bf16-adamw")
"""A job that takes as much on a card that is nearly full as with memory to spare; others make do with less there."""


@pytest.mark.parametrize(("past", "verdict"), [(0, "fits"), (-1, "tight")])
def test_the_verdict_turns_at_the_very_byte_of_the_upper_end(cli, past, verdict):
    upper = cli(*EVEN, "--gpu-memory", "64 GiB", "--json").data["peak"]["upper_bytes"]
    assert cli(*EVEN, "--gpu-memory", f"{upper + past} bytes", "--json").data["verdict"] == verdict


@pytest.mark.parametrize(("past", "verdict"), [(0, "tight"), (-1, "no")])
def test_the_verdict_turns_at_the_very_byte_of_the_expected_total(cli, past, verdict):
    device = cli(*EVEN, "--gpu-memory", "64 GiB", "--json").data["peak"]["device_bytes"]
    assert cli(*EVEN, "--gpu-memory", f"{device + past} bytes", "--json").data["verdict"] == verdict


def test_fit_without_a_config_exits_with_0_when_any_config_fits(cli):
    assert cli("fit", "gpt2", "--gpu", "t4").exit_code == 0
    assert cli("fit", "gpt2", "--gpu-memory", "512MiB").exit_code == 1


def test_strict_counts_fits_alone(cli):
    def codes(size):
        job = ("fit", "pythia-160m", "--config", "qlora", "--gpu-memory", f"{size} bytes")
        return (cli(*job).exit_code, cli(*job, "--strict").exit_code)

    peak = cli("fit", "pythia-160m", "--config", "qlora", "--gpu-memory", "64GiB", "--json").data["peak"]
    seen = [codes(size) for size in range(peak["upper_bytes"], peak["lower_bytes"], -(32 << 20))]
    assert seen == sorted(seen)
    assert set(seen) >= {(0, 0), (0, 1)}
    assert codes(peak["upper_bytes"] // 2) == (1, 1)


def test_where_exits_with_1_when_no_number_of_gpus_suffices(cli):
    assert cli("where", "pythia-160m", "--gpu-memory", "400 MiB").exit_code == 1
    assert cli("where", "pythia-160m", "--gpu", "t4").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        (*ASK, "--gpu", "h100", "--set", "offload.weights=cpu"),
        (*ASK, "--gpu", "h100", "--set", "offload.activations=cpu"),
        ASK,
        (*ASK, "--gpu", "local"),
        ("explain", "pythia-160m", "--gpu", "local"),
        ("max", "--gpu", "local"),
    ],
    ids=lambda arguments: " ".join(arguments[-2:]),
)
def test_what_is_not_modelled_or_not_there_exits_with_3_and_its_reason(refused, arguments):
    line = refused(*arguments, code=3)
    assert "not modelled yet" in line or "no GPU found" in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--config", "bf16-adamw-8bit"), "adamw-8bit-bnb: only the bundled optimizer keeps states in host memory"),
        (("--set", "optimizer=adafactor"), "adafactor: only the bundled optimizer"),
        (("--set", "optimizer=sgd"), "(adamw-bf16, adamw-fp32, adamw-int8, muon-bf16"),
        (("--set", "master_weights=fp32", "--set", "optimizer=adamw"), "use master_weights: none"),
        (("--config", "muon", "--set", "kernels.newton_schulz=torch"), "use min or fast"),
        (("--gpu", "dgx-spark"), "dgx-spark shares its memory with the CPU"),
    ],
    ids=str,
)
def test_states_that_cannot_lie_in_host_memory_exit_with_3_and_the_reason(refused, arguments, reason):
    defaults = {"--gpu": "h100", "--config": "bf16-adamw"}
    others = [word for name, value in defaults.items() if name not in arguments for word in (name, value)]
    job = ("fit", "pythia-160m", *others, "--set", "offload.optimizer_states=cpu")
    assert reason in refused(*job, *arguments, code=3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--set", "parallel.zero_stage=3"), "nothing to share; --gpus N, or parallel.data"),
        (
            ("--set", "parallel.data=2", "--set", "parallel.zero_stage=2"),
            "planned is data parallelism with zero_stage 3",
        ),
        (("--set", "parallel.tensor=8"), "tensor parallelism is not modelled"),
        (("--set", "parallel.sequence=true"), "sequence parallelism is not modelled"),
        (("--gpus", "2", "--config", "tier1"), "gradients of codes are not reduced; use bf16 or fp32"),
        (("--gpus", "2", "--config", "bf16-adamw-8bit"), "use parallel.zero_stage: 0"),
    ],
    ids=str,
)
def test_what_several_gpus_are_not_planned_with_exits_with_3_and_what_can_be_done(refused, arguments, reason):
    config = () if "--config" in arguments else ("--config", "bf16-adamw")
    assert reason in refused("fit", "pythia-160m", "--gpu", "h100", *config, *arguments, code=3)


def test_several_gpus_are_planned_by_data_parallelism(cli):
    ask = ("fit", "pythia-160m", "--gpu", "h100", "--config", "bf16-adamw", "--json")
    one, four = cli(*ask).data, cli(*ask, "--gpus", "4").data
    assert four["gpu"]["count"] == 4
    assert four["training"]["parallel"] == one["training"]["parallel"] | {"data": 4, "zero_stage": 3}
    assert four == cli(*ask, "--set", "parallel.data=4", "--set", "parallel.zero_stage=3").data | {
        "config": "bf16-adamw",
        "answer": four["answer"],
    }
    assert four["persistent_bytes"] < one["persistent_bytes"]
    assert {"communication", "nccl_buffers"} <= {row["name"] for row in four["components"]}
    replicas = cli(*ask, "--gpus", "4", "--set", "parallel.zero_stage=0").data
    assert replicas["training"]["parallel"]["zero_stage"] == 0
    assert replicas["persistent_bytes"] == one["persistent_bytes"]


def test_another_number_of_gpus_than_the_config_is_for_is_bad_input(refused):
    ask = ("fit", "pythia-160m", "--gpu", "h100", "--config", "bf16-adamw", "--set", "parallel.data=2")
    assert "the config is for parallel.data 2" in refused(*ask, "--gpus", "4", code=2)


def test_several_gpus_are_searched_and_explained(cli):
    found = cli("suggest", "pythia-160m", "--gpu", "rtx4090", "--gpus", "2", "--json")
    assert found.exit_code == 0
    assert {row["gpu"]["count"] for row in found.data["rows"]} == {2}
    assert cli("explain", "pythia-160m", "--gpus", "2").exit_code == 0
    assert "nccl_buffers" in cli("explain", "pythia-160m", "--gpus", "2").out


def test_measuring_takes_one_device(refused):
    pytest.importorskip("torch")
    ask = ("validate", "--device", "cpu", "--config", "bf16-adamw", "--set", "parallel.data=2")
    assert "memplan validate runs on one device" in refused(*ask, code=3)


@pytest.mark.parametrize("command", ["where", "max"])
def test_pooled_memory_is_not_asked_for_with_a_parallel_config(refused, command, write):
    config = write("two.yaml", "description: two\nparallel: {data: 2, zero_stage: 3}\n")
    model = ("pythia-160m",) if command == "where" else ("--gpus", "2")
    assert "leave it out" in refused(command, *model, "--gpu", "h100", "--config", config, code=3)


def test_a_family_that_is_not_supported_exits_with_3(refused, write):
    path = write("config.json", '{"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10}')
    assert "mamba" in refused("show", path, code=3)


def test_max_and_where_answer_for_several_gpus(cli):
    ran = cli("max", "--config", "tier3", "--gpu", "rtx4090", "--gpus", "4")
    assert ran.exit_code == 0
    assert " with tier3 on 4 x rtx4090: a bound, of pooled memory;" in " ".join(ran.out.split())


def test_a_bug_keeps_its_traceback_and_exits_with_70(cli, monkeypatch):
    import memplan.report.catalog_answer

    monkeypatch.delattr(memplan.report.catalog_answer, "list_document")
    ran = cli("list", "gpus")
    assert ran.exit_code == 70
    assert "Traceback" in ran.err
    assert ran.err.splitlines()[-1] == "memplan: this is a bug in memplan; please report it with the lines above"
