"""Serving a model: what the cache takes by hand, what a request adds, and how far it goes."""

import pytest

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.lookup import Shapes, find_model
from memplan.library.runs.served_model import InferenceOptions, refuse_method, serve
from memplan.report.json_schemas import schema_of
from memplan.units import format_bytes
from tests.jobs import follow_schema


@pytest.fixture
def served(catalog):
    def make(name, gpu="rtx4090", gpus=1, **options):
        return serve(find_model(name, Shapes(), catalog), InferenceOptions(**options), catalog, gpu, None, gpus)

    return make


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("llama-3.1-8b", {"context": 8192, "concurrency": 4}, 4 * 8192 * 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-8b", {"context": 8192, "kv_dtype": "fp8-e4m3"}, 8192 * 32 * 2 * 8 * 128),
        ("llama-3.1-8b", {"context": 100}, 112 * 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-8b", {"context": 100, "engine": "transformers"}, 100 * 32 * 2 * 8 * 128 * 2),
        ("deepseek-v2-lite", {"context": 1600}, 1600 * 27 * (512 + 64) * 2),
        ("mistral-7b-v0.1", {"context": 8192}, 4096 * 32 * 2 * 8 * 128 * 2),
        ("mistral-7b-v0.1", {"context": 8192, "engine": "transformers"}, 4095 * 32 * 2 * 8 * 128 * 2),
        ("gpt-oss-20b", {"context": 1600}, (12 * 1600 + 12 * 128) * 2 * 8 * 64 * 2),
        ("gemma-3-1b", {"context": 1600}, (4 * 1600 + 22 * 512) * 2 * 256 * 2),
    ],
)
def test_the_cache_by_hand(served, name, options, expected):
    assert served(name, **options).served.components["kv_cache"] == expected


def test_weights_are_every_tensor_in_its_format(served):
    assert served("llama-3.1-8b").served.components["weights"] == 8_030_261_248 * 2
    coded = served("llama-3.1-8b", weights="nf4-dq").served.components
    floats = (128_256 * 4096 * 2 + 65 * 4096) * 2
    assert floats < coded["weights"] < floats + 7_000_000_000 * 0.6
    assert coded["temporaries"] == 4096 * 14336 * 2


@pytest.mark.parametrize(("gpus", "key_heads"), [(2, 4), (4, 2), (8, 1), (16, 1)], ids=lambda number: str(number))
def test_gpus_share_matrices_and_cache_by_hand(served, gpus, key_heads):
    """Beyond eight GPUs each has a copy of one of the eight heads of keys and values."""
    shared = served("llama-3.1-8b", gpus=gpus, context=8192, concurrency=4).served.components
    attention = 4096 * 4096 * 2 // gpus + 4096 * key_heads * 128 * 2
    layer = attention + 3 * 4096 * 14336 // gpus + 2 * 4096
    assert shared["weights"] == 2 * (32 * layer + 4096 + 2 * 128_256 // gpus * 4096)
    assert shared["kv_cache"] == 4 * 8192 * 32 * 2 * key_heads * 128 * 2
    assert shared["logits"] == 4 * (128_256 * 6 + 128_256 // gpus * 2)


def test_what_latent_attention_caches_is_whole_on_every_gpu(served):
    one, four = (served("deepseek-v2-lite", "h100", gpus=gpus).served.components for gpus in (1, 4))
    assert four["kv_cache"] == one["kv_cache"]
    assert one["weights"] / 4 < four["weights"] < one["weights"] / 3.8


def test_a_vocabulary_is_padded_before_it_is_shared(served, refused):
    one, two = (served("gpt2", gpus=gpus).served.components for gpus in (1, 2))
    assert two["logits"] == 50_257 * 6 + 50_304 // 2 * 2
    assert two["weights"] < one["weights"] / 1.9
    arguments = ("--method", "inference", "--gpus", 5, "--gpu", "rtx4090")
    assert "50,304 padded words of GPT-2 XL cannot be shared evenly; 1 GPU can" in refused("fit", "gpt2-xl", *arguments)


@pytest.mark.parametrize(
    ("name", "weights"), [("Qwen/Qwen2.5-7B-Instruct-AWQ", "awq"), ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq-int4")]
)
def test_weights_in_groups_are_those_that_were_released(served, name, weights):
    answer = served(name)
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    floats = 2 * (2 * 152_064 * 3584 + 28 * (3584 + 1024 + 2 * 3584) + 3584)
    assert answer.weights == weights
    assert answer.served.components["weights"] == floats + matrices * 532 // 1024
    assert answer.served.components["temporaries"] == 0
    assert served(name, engine="transformers").served.components["temporaries"] == 3584 * 18944 * 2


@pytest.mark.parametrize(
    ("name", "gibibytes"), [("gpt-oss-20b", "12.8"), ("gpt-oss-120b", "60.8")], ids=["20b", "120b"]
)
def test_a_model_that_is_released_in_few_bits_is_served_so(served, name, gibibytes):
    """Checkpoint sizes of table 1 in https://arxiv.org/abs/2508.10925."""
    answer = served(name)
    assert f"{answer.served.components['weights'] / 2**30:.1f}" == gibibytes
    assert answer.weights == "expert_matrix=mxfp4"


@pytest.mark.parametrize(("weights", "gibibytes"), [("q8_0", 7.95), ("q6_k", 6.14)])
def test_llama_cpps_files_are_as_large_as_it_says(served, weights, gibibytes):
    """Of https://github.com/ggml-org/llama.cpp/blob/master/tools/quantize/README.md, for Llama-3.1-8B; norms are fp32 there."""
    assert abs(served("llama-3.1-8b", weights=weights).served.components["weights"] / 2**30 - gibibytes) < 0.006


def test_llama_cpps_head_has_six_bits_at_least(served):
    head, embedding, norms = 128_256 * 4096, 128_256 * 4096, 65 * 4096
    matrices = 8_030_261_248 - head - embedding - norms
    blocks = (matrices + embedding) // 32 * 18 + head // 256 * 210
    assert served("llama-3.1-8b", weights="q4-0").served.components["weights"] == blocks + norms * 2


@pytest.mark.parametrize(("weights", "said"), [("Q4_K_M", "give the .gguf file itself"), ("int4", "awq, gptq, nf4")])
def test_names_that_mean_several_formats_are_told_apart(served, weights, said):
    with pytest.raises(InvalidFileError, match=said):
        served("llama-3.1-8b", weights=weights)


def test_formats_are_given_by_role_too(served):
    plain, experts = (
        served("gpt-oss-20b", weights="bf16").served,
        served("gpt-oss-20b", weights="expert_matrix=mxfp4").served,
    )
    numbers = 24 * 32 * 3 * 2880 * 2880
    assert plain.components["weights"] - experts.components["weights"] == numbers * 2 - numbers * 17 // 32


def test_lines_add_up_and_the_largest_fits_while_the_next_does_not(served):
    answer = served("llama-3.1-8b", context=8192, concurrency=4)
    assert sum(answer.served.components.values()) == answer.served.device_bytes <= answer.served.upper_bytes
    context, count = answer.largest_context, answer.largest_concurrency
    assert served("llama-3.1-8b", context=context, concurrency=4).verdict == "fits"
    assert served("llama-3.1-8b", context=context + 1, concurrency=4).verdict != "fits"
    assert served("llama-3.1-8b", context=8192, concurrency=count).verdict == "fits"
    assert served("llama-3.1-8b", context=8192, concurrency=count + 1).verdict != "fits"


def test_a_released_format_is_taken_from_the_name(served):
    answer = served("unsloth/Meta-Llama-3.1-8B-bnb-4bit")
    assert answer.weights == "nf4"
    assert any("as released" in note for note in answer.notes)


def test_json_follows_its_schema(cli):
    ran = cli("fit", "qwen3-8b", "--method", "inference", "--gpu", "rtx4090", "--concurrency", 4, "--json")
    assert ran.exit_code == 0
    follow_schema(ran.data, schema_of("inference"))


def test_the_last_line_is_the_verdict(cli):
    job = ("fit", "llama-8b", "--method", "inference", "--gpu", "rtx4090")
    assert cli(*job, "-q").out == cli(*job, "--json").data["answer"] + "\n"


def test_what_does_not_fit_exits_with_1_and_is_offered_fewer_bits(cli, served):
    ran = cli("fit", "llama-8b", "--method", "inference", "--gpu", "rtx3060")
    assert ran.exit_code == 1
    for name, smaller in served("llama-3.1-8b", gpu="rtx3060").smaller.items():
        alone = served("llama-3.1-8b", gpu="rtx3060", weights=name).served
        assert (smaller.device_bytes, smaller.verdict) == (alone.device_bytes, "fits")
        assert f"--weights {name}: {format_bytes(alone.device_bytes)}, fits" in ran.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--method", "ppo"), 3, "method ppo is not modelled"),
        (("--method", "inference", "--weights", "q6-b64"), 3, "Q6-B64 is memplan.muon's own"),
        (("--method", "inferenc"), 2, "did you mean 'inference'"),
        (("--context", 9), 2, "--context applies to --method inference only"),
        (("--context", "4k"), 2, "--context applies to --method inference only"),
        (("--method", "inference", "--kv-dtype", "fp9"), 2, "--kv-dtype: unknown dtype 'fp9'"),
        (
            ("--method", "inference", "--qlora"),
            2,
            "takes no options of training: set the number of sequences with --concurrency",
        ),
        (("--method", "inference", "--tp", 2), 2, "--tp 2 takes --gpus 2"),
        (
            ("--method", "inference", "--gpus", 3),
            2,
            "32 attention heads of Llama-3.1-8B cannot be shared evenly; 2 GPUs can",
        ),
        (("--method", "inference", "--gpus", 4, "--pp", 2), 3, "other ways of serving are not modelled"),
        (("--method", "inference", "--gpus", 4, "--tp", 2), 3, "other ways of serving are not modelled"),
        (("--method", "inference", "--gpus", 2, "--engine", "transformers"), 3, "generate over several GPUs"),
        (("--method", "inference", "--weights", "q9-0"), 2, "unknown weight format"),
        (("--method", "inference", "--weights", "experts=mxfp4"), 2, "unknown role 'experts'"),
    ],
)
def test_what_is_refused(refused, arguments, code, message):
    assert message in refused("fit", "llama-8b", "--gpu", "rtx4090", *arguments, code=code)


def test_training_methods_are_the_training_step(cli):
    for method in ("sft", "pretrain"):
        assert cli("fit", "llama-8b", "--gpu", "rtx4090", "--qlora", "--method", method).exit_code == 0


@pytest.mark.parametrize(
    ("method", "error"), [("ppo", CannotAnswerError), ("grpo", InvalidFileError), ("nothing", InvalidFileError)]
)
def test_a_method_that_is_not_planned_is_refused(method, error):
    with pytest.raises(error):
        refuse_method(method)


def test_a_context_that_ends_with_the_positions_says_so(cli):
    out = cli("fit", "gpt2-xl", "--gpu", "rtx3060", "--method", "inference", "--context", "100000").out
    assert "1,024 tokens, all that the model has positions for" in " ".join(out.split())
    assert "positions" not in cli("fit", "llama-8b", "--gpu", "rtx4090", "--method", "inference").out


def test_weights_that_a_name_says_are_stored_in_a_layout_not_known_are_asked_for(cli):
    ran = cli("fit", "TheBloke/Llama-2-7B-Chat-GGUF", "--gpu", "rtx4090", "--method", "inference")
    assert (ran.exit_code, "released in gguf" in ran.err) == (3, True)
    assert (
        "weights gptq-int4" in cli("fit", "TheBloke/Llama-2-7B-GPTQ", "--gpu", "rtx4090", "--method", "inference").out
    )
