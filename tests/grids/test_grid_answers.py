"""``memplan fit`` for a model that is divided among GPUs."""

import pytest

import memplan
from memplan.report.json_schemas import schema_of
from tests.jobs import follow_schema

LLAMA = ("fit", "llama-70b", "--gpus", "64x h100", "--tp", "8", "--pp", "4")


def test_the_answer_names_the_fullest_rank_and_what_it_takes(cli):
    ran = cli(*LLAMA, "--zero", "1")
    assert ran.exit_code == 0
    assert ran.out.startswith("FITS    33.53 GiB expected, ")
    assert "25.39 GiB kept between steps" in ran.out
    assert ran.out.splitlines()[-1].startswith("FITS: rank 48, the fullest, takes 33.53 GiB in a step and ")
    assert "tensor 8, pipeline 4, data 2; distributed optimizer" in ran.out
    assert max(map(len, ran.out.split("Assumed")[0].splitlines())) <= 80


@pytest.mark.parametrize(
    ("length", "words", "verdict", "code"),
    [
        (4096, (), "fits", 0),
        (12288, (), "tight", 0),
        (12288, ("--strict",), "tight", 1),
        (14336, (), "unknown", 3),
        (131072, (), "no", 1),
    ],
)
def test_every_verdict_has_its_exit_code(cli, length, words, verdict, code):
    job = ("fit", "llama-8b", "--gpus", "8x h100", "--tp", "2", "--zero", "1", "-s", str(length), "--json")
    ran = cli(*job, *words)
    assert (ran.data["verdict"], ran.exit_code) == (verdict, code)
    assert ran.data["least_bytes"] < ran.data["expected_bytes"] < ran.data["upper_bytes"]


def test_json_follows_its_schema_and_adds_up(cli):
    data = cli(*LLAMA, "--zero", "1", "--rank", "all", "--json").data
    follow_schema(data, schema_of("grid"))
    for stage in data["stages"]:
        assert sum(line["bytes"] for line in stage["components"]) == stage["persistent_bytes"]
    assert data["persistent_bytes"] == max(stage["persistent_bytes"] for stage in data["stages"])
    parts = {line["name"]: line["bytes"] for line in data["stages"][0]["components"]}
    parameters = data["stages"][0]["parameters_per_rank"]
    assert parts["weights"] - 2 * parameters in range(2 * 64 * 300)  # paddings
    assert abs(parts["optimizer_states"] - 8 * parameters // 2) < 8 * 64 * 300


def test_states_that_do_not_fit_are_no(cli):
    ran = cli("fit", "llama-8b", "--gpus", "8", "--gpu", "rtx4090", "--pp", "2", "--rank", "7", "--sequence-parallel")
    assert ran.exit_code == 1
    assert ran.out.splitlines()[-1].startswith("NO: rank 4 takes")
    assert "rank 7\n" in ran.out
    assert "one tensor parallel rank has the whole sequence, which parallel.sequence does not change" in ran.out


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--gpus", "60", "--tp", "8", "--pp", "4"), 2, "60 GPUs are no multiple of tensor x pipeline x context = 32; the nearest that is: 64"),
        (("--gpus", "64", "--tp", "3"), 2, "64 GPUs are no multiple of tensor x pipeline x context = 3; the nearest that is: 63, or tensor 2"),
        (("--gpus", "48", "--tp", "3"), 2, "32 of attention heads cannot be divided among 3 tensor parallel ranks; the nearest that divides them is 2"),
        (("--gpus", "64", "--pp", "64"), 2, "32 layers cannot be divided among 64 stages; the nearest that divides them is 32"),
        (("--gpus", "5", "--pp", "5"), 2, "the nearest that divides them is 4; parallel.last_stage_layers: 8 leaves 6 for each other one"),
        (("--set", "parallel.megatron.compiled_loss=true", "--stack", "megatron", "--set", "kernels.loss=in-place"), 2, "in-place is another loss"),
        (("--set", "parallel.megatron.compiled_loss=true", "--stack", "trl"), 3, "what Megatron-LM alone is told is not modelled here"),
        (("--gpus", "2", "--tp", "2", "--stack", "deepspeed"), 3, "tensor parallelism is not modelled here; planned is data parallelism"),
        (("--gpus", "8", "--tp", "2", "--rank", "8"), 2, "rank: expected worst, all or a number from 0 to 7"),
        (("--gpus", "8", "--rank", "8"), 2, "--rank: expected worst, all or a number from 0 to 7"),
        (("--rank", "1"), 2, "--rank chooses among several GPUs: add --gpus"),
        (("--gpus", "12", "--nodes", "5", "--tp", "2"), 2, "the nearest that is: 10"),
        (("--gpus", "12", "--gpus-per-node", "8", "--tp", "2"), 2, "not 2 nodes of 8 GPUs; the nearest that is: 16"),
        (("--gpus", "1", "--nodes", "2"), 2, "--gpus 1 is not 2 nodes of equally many GPUs"),
        (("--gpus", "1", "--tp", "2"), 2, "1 GPUs are no multiple of tensor x pipeline x context = 2"),
        (("--gpus", "8", "--tp", "2", "--etp", "4"), 2, "parallel.expert_tensor: Llama-3.1-8B has no experts"),
        (("--gpus", "8", "--zero", "0", "--config", "lora", "--set", "parallel.engine=deepspeed"), 3, "0 is not supported under DeepSpeed"),
        (("--gpus", "8", "--pp", "2", "--set", "parallel.first_stage_layers=40"), 2, "have 40 layers, and the model 32"),
        (("--gpus", "8", "--tp", "2", "--set", "gradients.lifetime=layer"), 3, "gradients.lifetime is not modelled"),
        (("--gpus", "8x h100", "--tp", "2"), 2, "so does another option: give one of them"),
        (("--gpus", "8", "--ep", "8"), 2, "parallel.expert: Llama-3.1-8B has no experts"),
        (("--gpus", "8", "--tp", "2", "--hsdp", "2"), 2, "parallel.replicate: without --zero 1 nothing is divided"),
        (("--gpus", "16", "--tp", "2", "--hsdp", "3", "--zero", "1"), 2, "context x replicate = 6; the nearest that is: 18"),
        (("--gpus", "8", "--tp", "2", "--zero", "3"), 3, "3 under Megatron-LM is another engine"),
        (("--gpus", "8", "--tp", "2", "--set", "parallel.tensor=4"), 2, "given more than once"),
        (("--gpus", "8", "--tp", "2", "--config", "qlora"), 3, "tensor parallelism is not modelled"),
        (("--gpus", "8", "--tp", "2", "--set", "optimizer=muon-int4"), 3, "optimizer: muon-int4 under Megatron-LM"),
        (("--gpus", "8", "--tp", "2", "--set", "parallel.precision_aware=true"), 3, "set parallel.zero_stage: 1"),
        (("--gpus", "8", "--tp", "2", "--set", "parallel.precision_aware=true", "--set", "optimizer=sgd"), 3, "takes Adam alone; leave it out"),
        (("--gpus", "8", "--tp", "2", "--zero", "1", "--set", "optimizer=sgd"), 3, "takes SGD in host memory alone"),
        (("--gpus", "24", "--tp", "8", "--cp", "3", "-s", "1000"), 2, "1,000 tokens cannot be divided among 2 x 3 context parallel parts; the nearest that can: 996"),
        (("--gpus", "8", "--tp", "8", "--sequence-parallel", "-s", "1001"), 2, "8 tensor parallel ranks that share the sequence; the nearest that can: 1,000"),
        (("--gpus", "8", "--tp", "2", "--set", "parallel.schedule=gpipe"), 2, "Megatron-LM has no such setting"),
        (("--gpus", "8", "--pp", "2", "--schedule", "interleaved"), 2, "Megatron-LM has no such setting"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_impossible_or_not_modelled_is_one_line(refused, words, code, reason):
    assert reason in refused("fit", "llama-8b", "--gpu", "h100", *words, code=code)


def test_a_mixture_over_ranks_says_what_its_worst_case_takes_for_granted(cli, refused):
    job = ("fit", "mixtral-8x7b", "--gpus", "64x h100", "--tp", "2", "--pp", "4", "--etp", "1", "--zero", "1")
    assert "give --sequence-parallel" in refused(*job, code=2)
    shared, divided = (cli(*job, "--sequence-parallel", "--ep", ranks, "--json").data for ranks in ("1", "8"))
    assert "where every expert is given as many tokens" in divided["answer"]
    assert "where every expert is given as many tokens" not in shared["answer"]
    assert divided["not_modelled"][1:] == shared["not_modelled"]


def test_other_questions_say_that_fit_alone_plans_a_grid(refused):
    job = ("llama-8b", "--stack", "megatron", "--gpu", "h100")
    assert "planned by memplan fit, not by other commands" in refused("suggest", *job, "--gpus", "8", code=3)
    assert "memplan fit alone plans it" in refused("compare", *job, "--gpus", "8", "--tp", "4", code=3)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("  --swiglu: true\n  --no-bias-swiglu-fusion: true\n", "an activation that is not fused"),
        ("  --num-experts: 8\n  --moe-pad-expert-input-to-capacity: true\n", "padded to a capacity"),
    ],
)
def test_flags_that_keep_more_leave_a_step_unsaid(cli, tmp_path, flags, reason):
    file = tmp_path / "run.yaml"
    file.write_text(RUN + flags)
    ran = cli("fit", "llama-8b", "--gpu", "h100", "--gpus", "64", "--config", str(file), "--json")
    assert (ran.exit_code, ran.data["expected_bytes"]) == (3, None)
    assert reason in ran.data["answer"]


def test_micro_batches_of_a_step_are_those_that_pass_a_pipeline(cli):
    job = ("fit", "llama-8b", "--gpus", "8x h100", "--pp", "4", "--json")
    said = cli(*job, "--micro-batches", "6", "--schedule", "1f1b").data
    assert said["stages"] == cli(*job, "--set", "gradient_accumulation_steps=6").data["stages"]
    assert said["stages"] != cli(*job).data["stages"]


def test_machines_make_the_number_of_gpus(cli):
    one = cli("fit", "llama-8b", "--gpu", "h100", "--nodes", "2", "--tp", "2", "--json").data
    assert one == cli("fit", "llama-8b", "--gpus", "16x h100", "--tp", "2", "--json").data


def test_the_library_answers_the_same():
    options = {"gpu": "h100", "gpus": 2048, "set": {"parallel.pipeline": 16, "parallel.expert": 64}}
    options["set"] |= {"parallel.tensor": 2, "parallel.expert_tensor": 1, "parallel.zero_stage": 1}
    options["set"] |= {"parallel.last_stage_layers": 1, "parallel.sequence": True}
    plan = memplan.plan_grid("deepseek-v3", **options).plan
    assert plan.grid.data == 64
    assert plan.grid.expert_shards == 2
    assert [stage.layers for stage in plan.stages] == [4] * 15 + [1]
    assert plan.fullest.index == 1


def test_what_an_optimizer_keeps_by_its_precision():
    def kept(**keys):
        options = {"parallel.tensor": 2, "parallel.zero_stage": 1, **keys}
        states = memplan.plan_grid("llama-8b", gpu="h100", gpus=2, set=options).plan.fullest
        one = states.fullest
        return tuple(
            round(size / states.parameters, 2)
            for size in (one.weights, one.gradients, one.master_weights, one.optimizer_states)
        )

    assert kept() == (2, 4, 4, 8)
    assert kept(**{"gradients.dtype": "bf16"}) == (2, 2, 4, 8)
    assert kept(**{"parallel.precision_aware": True}) == (2, 4, 2, 8)
    assert kept(**{"parallel.precision_aware": True, "optimizer": "adamw-bf16"}) == (2, 4, 2, 4)
    assert kept(weights="fp32", master_weights="none") == (4, 4, 0, 8)
    assert kept(weights="fp16", compute_dtype="fp16") == (2, 2, 4, 8)
    assert kept(**{"offload.optimizer_states": "cpu"}) == (2, 4, 4, 0)
    assert kept(**{"offload.optimizer_states": "cpu", "parallel.precision_aware": True}) == (2, 4, 0, 0)
    assert kept(**{"optimizer": "sgd", "parallel.zero_stage": 0}) == (2, 4, 4, 4)
    assert kept(**{"optimizer": "sgd-momentum", "offload.optimizer_states": "cpu"}) == (2, 4, 4, 0)


@pytest.mark.parametrize(("optimizer", "size"), [("adamw-fp32", 16), ("sgd-momentum", 12), ("sgd", 8)])
def test_sgd_without_momentum_keeps_nothing_in_host_memory(optimizer, size):
    settings = {
        "parallel.tensor": 2,
        "parallel.zero_stage": 1,
        "offload.optimizer_states": "cpu",
        "optimizer": optimizer,
    }
    states = memplan.plan_grid("gpt2", gpu="h100", gpus=2, set=settings).plan.fullest
    assert round(states.fullest.host / states.parameters, 2) == size


RUN = """MODEL_ARGS:
  --num-layers: 32
  --hidden-size: 4096
  --num-attention-heads: 32
  --seq-length: 4096
  --micro-batch-size: 1
  --bf16: true
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 4
  --num-layers-per-virtual-pipeline-stage: 4
  --use-distributed-optimizer: true
  --grad-reduce-in-bf16: true
  --make-vocab-size-divisible-by: 1024
  --overlap-grad-reduce: true
  --hidden-dropout: 0.0
"""


def test_a_file_of_megatrons_flags_fills_the_degrees(cli, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    job = ("fit", "llama-8b", "--gpu", "h100", "--gpus", "64", "--json")
    read = cli(*job, "--config", str(file)).data
    assert read["parallel"]["virtual"] == 2
    keys = ("gradients.dtype=bf16", "parallel.vocabulary_multiple=1024", "parallel.overlap_gradients=true")
    settings = [word for key in keys for word in ("--set", key)]
    said = cli(*job, "-s", "4096", "--tp", "2", "--pp", "4", "--vp", "2", "--zero", "1", *settings).data
    assert read["stages"] == said["stages"]


def test_more_flags_of_megatron_say_what_is_kept(cli, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"""{RUN}  --use-precision-aware-optimizer: true
  --exp-avg-dtype: bf16
  --exp-avg-sq-dtype: bf16
  --transformer-impl: local
  --recompute-granularity: selective
  --recompute-modules: "[core_attn mlp]"
""".replace(
            "  --num-layers-per-virtual-pipeline-stage: 4\n",
            '  --pipeline-model-parallel-layout: "Et*3|(tttt|)*6tttttL"\n',
        )
    )
    job = ("fit", "llama-8b", "--gpu", "h100", "--gpus", "64", "--json")
    read = cli(*job, "--config", str(file)).data
    assert [stage["layers"] for stage in read["stages"]] == [7, 8, 8, 9]
    keys = (
        "parallel.precision_aware=true",
        "optimizer=adamw-bf16",
        "parallel.transformer_impl=local",
        "activation_checkpointing=selective",
        "parallel.recompute_modules=[core_attn,mlp]",
        "gradients.dtype=bf16",
    )
    keys += (
        "parallel.vocabulary_multiple=1024",
        "parallel.overlap_gradients=true",
        "parallel.stage_layout=Et*3|(tttt|)*6tttttL",
    )
    settings = [word for key in keys for word in ("--set", key)]
    assert read["stages"] == cli(*job, "-s", "4096", "--tp", "2", "--pp", "4", "--zero", "1", *settings).data["stages"]


def test_stage_0_is_a_stage(cli):
    job = ("fit", "gpt2", "--gpu", "h100", "--config", "bf16-adamw", "--stack", "transformers", "--gpus", "4", "--json")
    said, default = (cli(*job, *zero).data["training"]["parallel"] for zero in (("--zero", "0"), ()))
    assert (said["zero_stage"], default["zero_stage"]) == (0, 3)


def test_the_upper_end_has_wide_logits_whatever_loss_is_fused(cli):
    job = ("fit", "llama-8b", "--gpus", "8x h100", "--tp", "2", "--zero", "1", "--json")
    own, fused = cli(*job).data, cli(*job, "--set", "kernels.loss=in-place").data
    assert fused["upper_bytes"] == own["upper_bytes"]
    assert fused["least_bytes"] < own["least_bytes"]
