"""Programs that train embeddings: Sentence Transformers in Python, read and never run, and ms-swift's files."""

import pytest

import memplan
from memplan.errors import MemplanError
from memplan.library.answers.planned_job import plan_by_share

SCRIPT = """
from peft import LoraConfig, TaskType
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers import losses

model = SentenceTransformer("Qwen/Qwen3-Embedding-0.6B", model_kwargs={{"torch_dtype": "bfloat16"}})
model.max_seq_length = 384
{more}
loss = {loss}
args = SentenceTransformerTrainingArguments(output_dir="out", per_device_train_batch_size=16, bf16=True)
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=load(), loss=loss)
trainer.train()
"""
LORA = "model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=16, target_modules='all-linear'))"


def planned(tmp_path, loss="losses.MultipleNegativesRankingLoss(model)", more=""):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(loss=loss, more=more), encoding="utf-8")
    return plan_by_share(str(path), gpu="h100")


def test_a_program_says_its_model_its_length_its_batch_and_its_loss(tmp_path):
    answer = planned(tmp_path)
    assert (answer.training["micro_batch_size"], answer.training["sequence_length"]) == (16, 384)
    assert answer.training["stack"] == "sentence-transformers"
    assert answer.training["weights"]["hidden_matrix"] == "bf16"
    texts = answer.training["method"]["embedding"]
    assert (texts["columns"], texts["loss"], texts["mini_batch_size"]) == (2, "in-batch-negatives", None)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("BAAI/bge-base-en-v1.5", ("fp32", 512, "cls")),
        ("intfloat/multilingual-e5-base", ("fp32", 512, "mean")),
        ("sentence-transformers/all-MiniLM-L6-v2", ("fp32", 256, "mean")),
        ("sentence-transformers/all-mpnet-base-v2", ("fp32", 384, "mean")),
        ("sentence-transformers/multi-qa-mpnet-base-dot-v1", ("fp32", 512, "cls")),
        ("nomic-ai/modernbert-embed-base", ("fp32", 8192, "mean")),
        ("thenlper/gte-base", None),
        ("Alibaba-NLP/gte-modernbert-base", None),
    ],
)
def test_an_encoders_own_files_say_its_dtype_its_length_and_how_it_pools(tmp_path, model, said):
    script = SCRIPT.replace("Qwen/Qwen3-Embedding-0.6B", model).replace("model.max_seq_length = 384", "")
    script = script.replace(', model_kwargs={{"torch_dtype": "bfloat16"}}', "")
    path = tmp_path / "train.py"
    path.write_text(script.format(loss="losses.MultipleNegativesRankingLoss(model)", more=""), encoding="utf-8")
    if said is None:  # its file has fp16, which bf16 does not train
        with pytest.raises(MemplanError, match="weights in fp16 compute in fp16, not in bf16"):
            plan_by_share(str(path), gpu="h100")
        return
    training = plan_by_share(str(path), gpu="h100").training
    own = training["weights"]["hidden_matrix"], training["sequence_length"], training["method"]["embedding"]["pooling"]
    assert own == said


@pytest.mark.parametrize(
    ("loss", "keys"),
    [
        ("losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)", {"mini_batch_size": 4}),
        ("losses.CachedMultipleNegativesRankingLoss(model)", {"mini_batch_size": 32}),
        ("losses.TripletLoss(model)", {"columns": 3, "loss": "pairs"}),
        ("losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [256, 64])", {"merges": False}),
        (
            "losses.MatryoshkaLoss(model, losses.TripletLoss(model), [256, 64])",
            {"merges": True, "columns": 3},
        ),
        ("losses.CoSENTLoss(model)", {"loss": "pairs"}),
    ],
)
def test_a_loss_is_read_from_the_call_that_makes_it(tmp_path, loss, keys):
    texts = planned(tmp_path, loss).training["method"]["embedding"]
    assert {key: texts[key] for key in keys} == keys


def test_adapters_are_in_the_dtype_of_the_weights_that_they_are_put_on(tmp_path):
    """``add_adapter`` injects them, and nothing casts them then (peft/mapping.py, 0.21.2)."""
    adapter = planned(tmp_path, more=LORA).training["adapter"]
    assert (adapter["rank"], adapter["dtype"]) == (16, "bf16")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("losses.AdaptiveLayerLoss(model, losses.CoSENTLoss(model))", "several layers"),
        ("{'a': losses.CoSENTLoss(model), 'b': losses.MultipleNegativesRankingLoss(model)}", "or several"),
        ("losses.BatchHardTripletLoss(model)", "a loss with a graph of its own"),
        ("losses.MultipleNegativesSymmetricRankingLoss(model)", "scores in two directions"),
        (
            "losses.MultipleNegativesRankingLoss(model, directions=('query_to_doc', 'doc_to_query'))",
            "scores in several directions",
        ),
        (
            "losses.MultipleNegativesRankingLoss(model, hardness_mode='in_batch_negatives', hardness_strength=9)",
            "penalties of hard negatives",
        ),
    ],
)
def test_other_losses_are_refused(tmp_path, loss, said):
    with pytest.raises(MemplanError, match=said):
        planned(tmp_path, loss)


def test_ms_swift_is_refused_by_its_stage(tmp_path):
    path = tmp_path / "swift.yaml"
    path.write_text(
        "model: Qwen/Qwen3-Embedding-0.6B\ntask_type: embedding\nloss_type: infonce\ntuner_type: lora\nmax_length: 512\n",
        encoding="utf-8",
    )
    with pytest.raises(MemplanError, match=r"embedding as ms-swift .* is not modelled"):
        plan_by_share(str(path), gpu="h100")


@pytest.mark.parametrize(("task", "labels"), [("mnli", 3), ("stsb", 1), ("sst2", 2)])
def test_run_glue_learns_as_many_classes_as_its_task_has(task, labels):
    words = ["python", "run_glue.py", "--model_name_or_path", "distilbert-base-uncased", "--task_name", task]
    answer = memplan.import_file([*words, "--do_train", "--output_dir", "o"]).to_dict()
    assert (answer["method"]["stage"], answer["method"]["labels"]) == ("classification", labels)
    assert answer["training"]["sequence_length"] == 128


def test_a_head_for_masked_words_is_refused_by_name():
    words = ["python", "run_mlm.py", "--model_name_or_path", "roberta-base", "--do_train", "--output_dir", "o"]
    keys = memplan.import_file(words).to_dict()["keys"]
    assert any("masked words" in str(one) for one in keys["not_modelled"])
