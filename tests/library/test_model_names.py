"""What a model's name means: a folder, a cached repository, a listed name, or a guess that is said to be one."""

import json

import pytest

from memplan.errors import CannotAnswerError, GuessedNameWarning, InvalidFileError, UnknownNameError
from memplan.importer.quantised_names import weights_by_name
from memplan.library.lookup import Shapes, find_model, resolve_model_name
from memplan.library.lookup.model_names import hub_cache, is_known
from memplan.library.lookup.name_guesses import refuse_unmodelled
from tests.jobs import shipped_catalog

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def put(folder, name="config.json", **keys):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(LLAMA | keys if name == "config.json" else keys))
    return folder / name


@pytest.mark.parametrize(
    ("text", "target", "how"),
    [
        ("llama-8b", "llama-3.1-8b", "catalog"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b", "catalog"),
        ("META-LLAMA/llama_3.1_8b", "llama-3.1-8b", "catalog"),
        ("Qwen2.5-7B", "qwen2.5-7b", "catalog"),
        ("qwen25-7b", "qwen2.5-7b", "catalog"),
        ("someone/Llama-3.1-8B-Instruct-tuned-on-poems", "llama-3.1-8b", "guess"),
        ("philschmid/llama-3-1-8b-math-orca-spectrum-10k-ep1", "llama-3.1-8b", "guess"),
        ("someone/Qwen2.5-0.5B-sft-v3", "qwen2.5-0.5b", "guess"),
        ("someone/phi-4-bf16", "phi-4", "guess"),
        ("someone/Llama-3-Poems-8B-v0.9", "llama-3-8b", "guess"),
        ("stabilityai/stablelm-base-alpha-3b", "stablelm-base-alpha-3b", "catalog"),
        ("someone/Mistral-7B-Instruct-v0.3-AWQ", "mistral-7b-v0.3", "guess"),
        ("someone/Mistral-Nemo-Instruct-2407-of-poems", "mistral-nemo-12b", "guess"),
        ("someone/poems-Mistral-Small-Instruct-2409", "mistral-small-22b", "guess"),
        ("Menlo/Jan-nano", "qwen3-4b", "mirror"),
        ("tiiuae/falcon-11B", "falcon-11b", "catalog"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b", "catalog"),
        ("HuggingFaceH4/zephyr-7b-gemma-v0.1", "gemma-7b", "mirror"),
        ("zephyr-7b-beta", "mistral-7b-v0.1", "mirror"),
        ("Gryphe/MythoMax-L2-13b", "llama-2-13b", "guess"),
        ("TheBloke/MythoMax-L2-13B-GPTQ", "llama-2-13b", "guess"),
        ("zai-org/GLM-Z1-Rumination-32B-0414", "glm-z1-rumination-32b-0414", "catalog"),
        ("alpindale/WizardLM-2-8x22B", "mixtral-8x22b-v0.1", "guess"),
        ("t-tech/T-pro-it-2.0", "qwen3-32b", "guess"),
        ("AIDC-AI/Marco-Mini-Base", "marco-mini-17b-a0.9b", "catalog"),
        ("opendatalab/MinerU2.5-Pro-2604-1.2B", "mineru2.5-1.2b", "catalog"),
        ("jingyaogong/MiniMind2-Small", "minimind2-small", "catalog"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b", "catalog"),
    ],
)
def test_a_name_means_an_entry(catalog, text, target, how):
    resolved = resolve_model_name(text, catalog)
    assert (resolved.target, resolved.how) == (target, how)
    assert bool(resolved.notes) == (how == "guess")


def test_a_guess_says_what_it_is_made_by(catalog):
    assert "guessed from what it was trained from to have" in resolve_model_name("GAIR/LIMO", catalog).notes[0]
    assert "guessed from its name to have" in resolve_model_name("someone/Qwen2.5-7B-poems", catalog).notes[0]
    assert is_known("Qwen/Qwen2.5-7B", catalog)
    assert not is_known("GAIR/LIMO", catalog)


@pytest.mark.parametrize(
    "text",
    [
        "someone/Qwen2.5-7B-4B-merge", "someone/Qwen2.5-7B-reranker", "someone/Ministral-3b-mine",
        "someone/Mistral-Small-9-24B", "someone/Mistral-Poems-7B-v0.9", "someone/llama-3.1-8b-to-gemma-distilled",
        "someone/gemma-7b-llama", "someone/phi-4-of-mine", "someone/qwen25-7b-4x7b", "custom_model_name",
        "no/such-model", "llama3-3B", "someone/llama-1-3b", "qwen-38b",
    ],
)  # fmt: skip
def test_no_guess_is_made_where_shapes_may_differ(catalog, text):
    with pytest.raises(UnknownNameError, match=r"unknown model .* give its config\.json"):
        resolve_model_name(text, catalog)


def test_a_family_that_is_not_modelled_is_refused_by_name(catalog):
    for row in catalog.tables.unmodelled.values():
        for start in row.begins:
            with pytest.raises(CannotAnswerError) as refused:
                resolve_model_name(f"someone/{start}-7B", catalog)
            assert row.reason in str(refused.value)
    for name in ("OpenGVLab/InternVL3-8B", "someone/Llama-3.1-8B-vision", "microsoft/Phi-4-multimodal-instruct"):
        with pytest.raises(CannotAnswerError, match="vision-language"):
            resolve_model_name(name, catalog)


def test_of_a_model_with_code_of_its_own_the_release_for_transformers_is_named(catalog):
    with pytest.raises(
        CannotAnswerError, match="OpenGVLab/InternVL3-2B-hf is the release that transformers' own code runs"
    ):
        resolve_model_name("OpenGVLab/InternVL3-2B", catalog)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("MAGAer13/mplug-owl2-llama2-7b", "vision part"),
        ("sensenova/SenseNova-SI-InternVL3-8B", "vision part"),
        ("internlm/internlm-xcomposer2d5-7b", "vision part"),
        ("Alibaba-NLP/gte-Qwen2-7B-instruct", "see those behind them"),
        ("google/diffusiongemma-26B-A4B-it", "denoise blocks"),
        ("deepseek-ai/DeepSeek-V4.1-Flash", "selects or compresses"),
        ("Qwen/Qwen2.5-Math-PRM-7B", "code of its own"),
        ("IQuestLab/IQuest-Coder-V1-40B-Instruct", "code of its own"),
        ("TongyiFinance/Tongyi-Finance-14B", "code of its own"),
        ("mispeech/midashenglm-7b", "other parts than the text model"),
    ],
)
def test_a_trainers_registered_model_that_is_not_modelled_is_refused_with_its_reason(catalog, text, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        resolve_model_name(text, catalog)


@pytest.mark.slow
def test_no_model_of_the_catalog_is_refused_by_name(catalog):
    for key in ("hf_id", "ids", "mirrors"):
        for text, _ in catalog.models.listed(key):
            refuse_unmodelled(text, catalog)


def test_a_folder_of_that_name_goes_first_and_only_with_a_config(catalog, tmp_path):
    (tmp_path / "here" / "gpt2").mkdir()
    assert resolve_model_name("gpt2", catalog).how == "catalog"
    put(tmp_path / "here" / "gpt2")
    assert resolve_model_name("gpt2", catalog).how == "folder"
    assert find_model("gpt2", Shapes(), catalog).spec.hidden_size == 64


def test_a_path_to_nothing_is_refused(catalog):
    with pytest.raises(InvalidFileError, match="no such file or directory"):
        resolve_model_name("./gpt2", catalog)


def test_the_cache_goes_before_the_catalog_and_takes_the_revision_of_main(catalog, own_cache):
    folder = own_cache / "models--meta-llama--Llama-3.1-8B"
    put(folder / "snapshots" / "ffff", hidden_size=128)
    file = put(folder / "snapshots" / "aaaa")
    assert (
        resolve_model_name("meta-llama/Llama-3.1-8B", catalog).target == folder / "snapshots" / "ffff" / "config.json"
    )
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("aaaa\n")
    resolved = resolve_model_name("meta-llama/Llama-3.1-8B", catalog)
    assert (resolved.target, resolved.how) == (file, "cache")
    model = find_model("meta-llama/Llama-3.1-8B", Shapes(), catalog)
    assert (model.spec.name, model.spec.hidden_size) == ("Llama-3.1-8B", 64)


@pytest.mark.parametrize("text", ["../x", "a/../../b", "models--x", "a b/c", "x/y/z", ""])
def test_a_cache_entry_is_found_by_a_repository_alone(catalog, own_cache, text):
    put(own_cache / "snapshots" / "aaaa")
    with pytest.raises((UnknownNameError, InvalidFileError)):
        resolve_model_name(text, catalog)


def test_an_adapter_means_its_base_model(catalog, own_cache):
    at = own_cache / "models--me--poems" / "snapshots" / "aaaa"
    put(at, "adapter_config.json", peft_type="LORA", r=8, base_model_name_or_path="Qwen/Qwen2.5-7B")
    resolved = resolve_model_name("me/poems", catalog)
    assert (resolved.target, resolved.how) == ("qwen2.5-7b", "catalog")
    assert "adapter.rank=8" in resolved.notes[0]


def test_an_adapter_that_is_its_own_base_is_refused(catalog, own_cache):
    at = own_cache / "models--me--poems" / "snapshots" / "aaaa"
    put(at, "adapter_config.json", peft_type="LORA", base_model_name_or_path="me/poems")
    with pytest.raises(CannotAnswerError, match="PEFT adapter"):
        resolve_model_name("me/poems", catalog)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("unsloth/Llama-3.2-3B-unsloth-bnb-4bit", "nf4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq-int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "gptq-int8"),
        ("TheBloke/Llama-2-13B-GPTQ", "gptq-int4"),
        ("TheBloke/Llama-2-7B-Chat-GGUF", "gguf"),
        ("bartowski/Qwen2.5-7B-Instruct-Q4_K_M", "gguf"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "mlx"),
        ("turboderp/Llama-3-8B-exl2", "exl2"),
        ("google/gemma-3-4b-it-qat-q4_0-unquantized", None),
        ("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ", "awq-int4"),
        ("Qwen/Qwen3-8B-FP8", "fp8-e4m3"),
        ("Qwen/Qwen3-8B", None),
    ],
)
def test_a_name_states_how_weights_are_stored(text, weights):
    assert weights_by_name(text) == weights


def test_a_guess_is_said_on_standard_error_and_in_the_answer(cli):
    ran = cli("fit", "someone/gemma-2-9b-it-poems-AWQ", "--gpu", "h100", "--config", "qlora", "--json")
    line = "guessed from its name to have the shapes of Gemma-2-9B"
    assert ran.err.startswith("memplan: 'someone/gemma-2-9b-it-poems-AWQ' is ")
    assert "its weights are awq-int4; they are planned in the formats of the training config" in ran.err
    assert line in ran.err
    assert any(line in text for text in ran.data["assumptions"])
    assert any("released in awq-int4" in text for text in ran.data["assumptions"])


def test_the_library_warns_of_a_guess(catalog):
    with pytest.warns(GuessedNameWarning, match="give its config"):
        find_model("someone/gemma-2-9b-it-poems", Shapes(), catalog)


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({"HF_HUB_CACHE": "/a/b"}, "/a/b"),
        ({"HUGGINGFACE_HUB_CACHE": "/a/c"}, "/a/c"),
        ({"HF_HOME": "/a"}, "/a/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, ".cache/huggingface/hub"),
    ],
)
def test_the_cache_lies_where_huggingface_puts_it(monkeypatch, given, end):
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert str(hub_cache()).endswith(end)


def test_a_path_into_another_machines_cache_of_hugging_face_names_its_repository():
    folder = "/share/hub/models--Qwen--Qwen3-4B"
    for path in (folder, f"{folder}/snapshots/1cfa9a7208912126459214e8b04321603b3df60c"):
        resolved = resolve_model_name(path, shipped_catalog(), elsewhere=True)
        assert (resolved.target, resolved.how) == ("qwen3-4b", "catalog")
    with pytest.raises(UnknownNameError):
        resolve_model_name("/share/hub/models--own--model/snapshots/1cfa", shipped_catalog(), elsewhere=True)


def test_a_path_of_windows_and_a_point_as_modelscope_writes_it_name_a_model():
    resolved = resolve_model_name("D:\\models\\Qwen\\Qwen3-1___7B", shipped_catalog(), elsewhere=True)
    assert (resolved.target, resolved.how) == ("qwen3-1.7b", "guess")
    assert "'D:\\\\models\\\\Qwen\\\\Qwen3-1___7B' is guessed" in resolved.notes[0]
