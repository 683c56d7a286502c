"""What a plan says by attribute, what is refused, and how it looks in a notebook."""

import pickle
from html.parser import HTMLParser

import pytest

import memplan
from memplan.plan.components import COMPONENTS

ON = {"gpu": "rtx4090"}


@pytest.fixture(scope="module")
def plan() -> memplan.Plan:
    return memplan.plan("llama-3.1-8b", config="bf16-adamw", **ON)


def test_components_add_up_to_the_expected_bytes(plan):
    assert sum(plan.components.values()) == plan.expected_bytes
    assert tuple(plan.components) == COMPONENTS
    shown = {row["name"]: row for row in plan.to_dict()["components"]}
    assert {name: int(size) for name, size in plan.components.items() if size} == {
        name: row["bytes"] for name, row in shown.items()
    }
    line, row = plan.components["temporaries"], shown["temporaries"]
    assert (line.name, line.formula) == ("temporaries", row["formula"])
    assert (line.source, line.kind, dict(line.values)) == (row["source"], row["kind"], row["values"])


def test_a_component_that_a_job_has_none_of_is_nothing(plan):
    assert plan.components["communication"] == 0
    assert "communication" in plan.components


def test_a_plan_and_its_components_can_be_sent_to_another_process(plan):
    again = pickle.loads(pickle.dumps(plan))
    assert again.to_dict() == plan.to_dict()
    size = pickle.loads(pickle.dumps(plan.components["weights"]))
    assert (size, size.formula) == (plan.components["weights"], plan.components["weights"].formula)
    padded = memplan.plan("gpt2", config="lora", gpu="rtx4090", micro_batch_size=2)  # which plans padded rows, too
    assert pickle.loads(pickle.dumps(padded)).upper_bytes == padded.upper_bytes
    job = pickle.loads(pickle.dumps(memplan.job("gpt2", config="lora")))
    assert job.plan("rtx4090").verdict == "fits"


def test_an_unknown_component_is_refused_with_the_nearest(plan):
    assert "logit" not in plan.components
    with pytest.raises(memplan.UnknownNameError, match="did you mean 'logits'"):
        plan.components["logit"]


def test_a_plan_has_what_its_json_has(plan):
    data = plan.to_dict()
    assert (plan.verdict, plan.config, plan.gpu) == (data["verdict"], data["config"], data["gpu"]["name"])
    assert plan.model == data["model"]["name"]
    assert plan.usable_bytes == data["gpu"]["usable_bytes"]
    assert (plan.expected_bytes, plan.upper_bytes) == (data["peak"]["device_bytes"], data["peak"]["upper_bytes"])
    assert plan.peak_instant == data["peak"]["instant"]
    assert plan.instants == {row["name"]: row["requested_bytes"] for row in data["instants"]}
    assert [suggestion.change for suggestion in plan.suggestions] == [row["change"] for row in data["suggestions"]]
    assert plan.training == data["training"]
    assert plan.sentence == data["answer"]


def test_training_keys_are_taken_back_as_a_config(plan):
    again = memplan.plan("llama-3.1-8b", config=plan.training, **ON)
    assert again.upper_bytes == plan.upper_bytes
    assert again.config == "config"
    assert memplan.plan("llama-3.1-8b", config=plan.to_dict(), **ON).upper_bytes == plan.upper_bytes
    assert (
        memplan.plan("llama-3.2-1b", config={"weights": {"default": "fp32"}}, **ON).training["weights"]["norm"]
        == "fp32"
    )


def test_a_model_is_looked_up_once_and_given_again():
    model = memplan.plan("gpt2", **ON).memory.model
    assert memplan.plan(model, **ON).expected_bytes == memplan.plan("gpt2", **ON).expected_bytes


def test_a_catalog_is_opened_once_or_by_its_path(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("configs:\n  mine: {description: mine, weights: {default: fp32}}\n")
    plan = memplan.plan("gpt2", config="mine", catalog=own, **ON)
    assert memplan.plan("gpt2", config="mine", catalog=plan.catalog, **ON).to_dict() == plan.to_dict()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "rtx4009"}, "unknown GPU 'rtx4009'; did you mean"),
        ({"gpu": "8x h100"}, "several: --gpus"),
        ({"gpu": "24GB"}, "for one of that size: --gpu-memory 24GiB"),
        ({"config": "qlor", **ON}, "unknown training config 'qlor'; did you mean 'qlora'"),
        ({"micro_batch_size": 0, **ON}, "micro_batch_size: expected a whole number from 1 to 16,777,216, got 0"),
        ({"sequence_length": "4k", **ON}, "sequence_length: expected a whole number"),
        ({"micro_batch_size": True, **ON}, "micro_batch_size: expected a whole number"),
        ({"gpus": 0, **ON}, "gpus: expected a whole number from 1"),
        ({"activation_checkpointing": "ful", **ON}, "expected none, selective or full, got 'ful'; did you mean 'full'"),
        ({"set": {"kernels.optimizer": "fusd"}, **ON}, "fusd"),
        ({"micro_batch_size": 4, "set": {"micro_batch_size": 1}, **ON}, "micro_batch_size: given by itself and in set"),
        ({"sequence_length": 4, "set": ["sequence_length = 1"], **ON}, "sequence_length: given by itself and in set"),
        ({"gpu_memory": "24", "config": "lora"}, "24"),
        ({"gpu": "rtx4090", "gpu_memory": "24GiB"}, "give one of them"),
    ],
)
def test_bad_input_is_refused_by_name(options, words):
    with pytest.raises(memplan.MemplanError) as error:
        memplan.plan("gpt2", **options)
    assert words in str(error.value)


def test_every_number_out_of_range_is_told_at_once():
    with pytest.raises(memplan.InvalidFileError) as error:
        memplan.plan("gpt2", micro_batch_size=-1, sequence_length=0, activation_checkpointing="", **ON)
    assert len(error.value.problems) == 3


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (
            lambda: memplan.plan("gpt2", batch_size=4),
            r"memplan.plan\(\) got an unexpected keyword argument 'batch_size'",
        ),
        (lambda: memplan.plan("gpt2", batch=4), "did you mean 'micro_batch_size'"),
        (lambda: memplan.plan("gpt2", lora_rank=64), "'lora_rank'; it takes gpu, .*, set,"),
        (lambda: memplan.plan("gpt2", sequence=4), "did you mean 'sequence_length'"),
        (lambda: memplan.suggest("gpt2", minbatch=4), "did you mean 'min_batch'"),
        (lambda: memplan.fit("gpt2", config="lora"), "takes no config"),
        (lambda: memplan.job("gpt2", gpu="rtx4090"), "takes no gpu: name the GPU in each plan"),
        (lambda: memplan.compare("gpt2", config="lora"), "takes no config: name all of them in configs"),
        (lambda: memplan.where("gpt2", gpus=4), "takes no gpus: how many GPUs it takes is the question"),
        (lambda: memplan.frontier("gpt2", micro_batch_size=4), "takes no micro_batch_size: batches are an axis"),
    ],
)
def test_a_keyword_that_is_not_taken_is_an_error_of_the_program(question, words):
    with pytest.raises(TypeError, match=words):
        question()


def test_a_model_that_is_not_named_or_named_twice():
    with pytest.raises(memplan.InvalidFileError, match="no model given"):
        memplan.plan(**ON)
    with pytest.raises(memplan.InvalidFileError, match="give one of them"):
        memplan.plan("gpt2", shapes=memplan.Shapes(layers=2, hidden=64, heads=2), **ON)
    with pytest.raises(memplan.InvalidFileError, match="searches the catalog for a model"):
        memplan.largest("gpt2", of="parameters", **ON)
    with pytest.raises(memplan.InvalidFileError, match="did you mean 'batch'"):
        memplan.largest("gpt2", of="batches", **ON)


def test_a_profile_is_that_of_one_card(tmp_path):
    with pytest.raises(memplan.InvalidFileError, match="name the card with gpu"):
        memplan.where("gpt2", profile=tmp_path / "profile.json")
    device = memplan.plan("gpt2", config="lora", **ON).memory.device
    with pytest.raises(memplan.InvalidFileError, match="give one of them"):
        memplan.plan("gpt2", config="lora", gpu=device, gpu_memory="24GiB")


def test_what_is_not_modelled_is_refused():
    with pytest.raises(memplan.CannotAnswerError) as error:
        memplan.plan("gpt2", set={"offload.weights": "cpu"}, **ON)
    assert isinstance(error.value, memplan.MemplanError)


# ------------------------------------------------------------------ notebooks
class Tags(HTMLParser):
    """The tags, attributes and texts of a piece of HTML, which must be closed in order."""

    VOID = ("br",)

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_html_has_a_bar_for_each_component(plan):
    seen = Tags(plan._repr_html_())
    for name, size in plan.components.items():
        assert (name in seen.text) == (size > 0)
    assert plan.sentence in seen.text
    bars = [value for key, value in seen.attributes if key == "style" and "background:#" in (value or "")]
    assert len(bars) == sum(size > 0 for size in plan.components.values()) + 3


def test_html_asks_for_nothing_from_outside(plan):
    for html in (plan._repr_html_(), memplan.fit("gpt2", **ON)._repr_html_()):
        seen = Tags(html)
        assert not {"script", "img", "link", "style", "iframe"} & set(seen.tags)
        assert {key for key, _ in seen.attributes} == {"style"}
        assert "url(" not in html
        assert "://" not in seen.attributes


def test_html_escapes_names_that_others_wrote(tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>\x1b[31m"
    folder.mkdir()
    config = folder / "a.yaml"
    config.write_text("description: '<b>&'\n")
    plan = memplan.plan("llama-3.2-1b", config=str(config), **ON)
    assert "\x1b" not in repr(plan)
    for html in (plan._repr_html_(), memplan.compare("llama-3.2-1b", [str(config)], **ON)._repr_html_()):
        assert "img" not in Tags(html).tags
        assert "\x1b" not in html
        assert "&lt;img" in html


def test_experts_that_stay_in_16_bits_are_said():
    plan = memplan.plan("gpt-oss-20b", config="qlora", gpu="h100")
    assert any(line.startswith("experts stay in bf16") for line in plan.memory.assumptions)
    assert not any("experts" in line for line in memplan.plan("gpt2", config="qlora", gpu="h100").memory.assumptions)
