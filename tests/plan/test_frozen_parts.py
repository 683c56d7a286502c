"""Models of which parts train: what is kept of the rest, and what is refused."""

from dataclasses import replace

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.training_config import Adapter, Freeze, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.lookup.model_lookup import catalog_model
from memplan.model.inventory import expanded, parameter_count
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.suggested.config_changes import Change
from memplan.solver.search.axes import full_space
from memplan.solver.search.best_first import Search
from memplan.training.resolution.resolve_config import resolve
from memplan.training.rules.frozen_rules import trained_names
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
FULL = TrainingConfig("test", stack="transformers", micro_batch_size=2, sequence_length=512)
MODEL = catalog_model("qwen2.5-0.5b", CATALOG)
LAYERS = MODEL.spec.num_hidden_layers


def compiled(freeze, **keys):
    return CompiledPlan(MODEL, resolve(replace(FULL, freeze=freeze, **keys), CATALOG, "test"))


def instants(freeze, **keys):
    return dict(compiled(freeze, **keys).evaluate(Device(CATALOG.gpus["a100-sxm-80gb"], "a100")).instants)


def test_a_model_that_is_frozen_nowhere_is_planned_like_one_that_says_nothing():
    plain, all_train = compiled(Freeze()), compiled(Freeze(parameters=("no such name",)))
    assert plain.requested_bytes(2, 512) == all_train.requested_bytes(2, 512)
    assert plain.persistent_bytes == all_train.persistent_bytes


@pytest.mark.parametrize(
    "freeze", [Freeze(last_layers=3), Freeze(roles=("norm",)), Freeze(train=("mlp",)), Freeze(parameters=("embed",))]
)
def test_gradients_and_states_are_those_of_what_trains(freeze):
    plan, names = compiled(freeze), trained_names(MODEL, freeze)
    elements = sum(tensor.elements for name, tensor in expanded(MODEL.inventory) if name in names)
    assert 0 < elements < parameter_count(MODEL.inventory)
    assert (plan.states.gradient_bytes, plan.states.state_bytes) == (
        2 * elements,
        4 * elements + 4 * len(names),
    )  # steps
    assert plan.states.weight_bytes == compiled(Freeze()).states.weight_bytes


def test_layers_below_the_lowest_that_trains_have_no_backward_and_save_nothing():
    last, whole = instants(Freeze(last_layers=2), activation_checkpointing="none"), instants(Freeze())
    assert {name for name in last if "layer" in name} == {f"layer {LAYERS} backward", f"layer {LAYERS - 1} backward"}
    assert last["loss backward"] < whole["loss backward"]
    first = instants(Freeze(first_layers=2), activation_checkpointing="none")
    assert f"layer {LAYERS // 2} backward" in first or "layer 3 backward" in first


def test_checkpointing_of_transformers_lets_gradients_through_down_to_the_embedding():
    found = instants(Freeze(last_layers=2), activation_checkpointing="full")
    assert {"layer 1 backward", "end of backward"} <= found.keys()
    off = instants(Freeze(last_layers=2, input_gradients=False), activation_checkpointing="full")
    assert "layer 1 backward" not in off


def test_llama_factory_checkpoints_layers_that_train_and_keeps_the_others_narrow():
    keys = {"stack": "llama-factory", "weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
    plan = compiled(Freeze(last_layers=2), **keys)
    trained = sum(tensor.weight_bytes * tensor.tensor.count for tensor in plan.states.tensors if tensor.trainable)
    elements = sum(
        t.elements for name, t in expanded(MODEL.inventory) if name in trained_names(MODEL, Freeze(last_layers=2))
    )
    assert trained == 4 * elements
    assert plan.states.weight_bytes == 2 * (parameter_count(MODEL.inventory) + elements)
    assert "layer 1 backward" not in instants(Freeze(last_layers=2), **keys)


@pytest.mark.parametrize("freeze", [Freeze(last_layers=1), Freeze(last_layers=3, parts=("linear_attn",))])
def test_linear_attention_below_the_lowest_layer_that_trains_saves_nothing(freeze):
    model = catalog_model("qwen3.5-0.8b", CATALOG)
    setups = [
        resolve(replace(FULL, freeze=one, activation_checkpointing="none"), CATALOG, "test")
        for one in (Freeze(), freeze)
    ]
    whole, part = (
        CompiledPlan(model, setup).evaluate(Device(CATALOG.gpus["a100-sxm-80gb"], "a100")) for setup in setups
    )
    layers = {name for name, _ in part.instants if name.startswith("layer")}
    assert "layer 1 backward" not in layers
    assert part.requested_bytes < whole.requested_bytes // 2


def test_a_choice_that_matches_nothing_is_told_names_of_the_language_model():
    model = catalog_model("qwen3.5-0.8b", CATALOG)
    with pytest.raises(InvalidFileError, match=r"its names are model.language_model.embed_tokens.weight, "):
        CompiledPlan(model, resolve(replace(FULL, freeze=Freeze(train=("no such name",))), CATALOG, "test"))


def test_a_model_of_a_plan_with_frozen_parts_is_whole_again_where_all_train():
    whole, again = compiled(Freeze()), compiled(Freeze(last_layers=2)).model
    plan = CompiledPlan(again, resolve(FULL, CATALOG, "test"))
    assert plan.requested_bytes(2, 512) == whole.requested_bytes(2, 512)
    assert plan.persistent_bytes == whole.persistent_bytes


@pytest.mark.parametrize("trainer", ["trl", "axolotl", "llama-factory"])
def test_files_that_cannot_say_what_is_frozen_are_not_written(cli, trainer):
    ran = cli("emit", "qwen3-0.6b", "-g", "h100", "-c", "bf16-adamw", "--set", "freeze.last_layers=2", "--as", trainer)
    assert ran.exit_code == 3
    assert "read back, it differs in" in ran.err
    assert "freeze" in ran.err


def test_parts_count_within_layers_and_patterns_anywhere():
    names = trained_names(MODEL, Freeze(first_layers=1, parts=("mlp",), train=("norm.weight$",)))
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.1.mlp.up_proj.weight" not in names
    assert "model.norm.weight" in names
    assert "model.layers.5.input_layernorm.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight" not in names
    assert trained_names(MODEL, Freeze(parameters=("layers",), train=("layers.3.mlp",))) >= {"model.norm.weight"}
    assert trained_names(MODEL, Freeze(last_layers=999, roles=("bias",))) == {
        f"model.layers.{n}.self_attn.{p}_proj.bias" for n in range(LAYERS) for p in "qkv"
    }


@pytest.mark.parametrize(
    ("freeze", "text"),
    [
        (Freeze(train=("(",)), "no regular expression"),
        (Freeze(train=("(a+)+$",)), "could take long to match"),
        (Freeze(parameters=(".?" * 30,)), "could take long to match"),
        (Freeze(parameters=("lm_head",) * 3000), "3,000 patterns could take long to match"),
        (Freeze(roles=("heads",)), "unknown role 'heads'"),
        (Freeze(last_layers=0), "expected a whole number from 1"),
        (Freeze(input_gradients=True), "it counts where parameters are frozen"),
        (Freeze(train=("no such name",)), "no parameter of Qwen2.5-0.5B trains"),
    ],
)
def test_a_wrong_choice_is_told_with_what_it_is(freeze, text):
    with pytest.raises(InvalidFileError, match=text.replace("(", r"\(")):
        compiled(freeze)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"stack": "bundled"}, "not modelled for stack bundled"),
        ({"stack": "trl", "adapter": Adapter()}, "beside adapters"),
        ({"parallel": Parallel(data=2)}, "on several GPUs"),
        ({"compile": "model"}, "not modelled where parts of the model are frozen"),
    ],
)
def test_what_is_not_followed_is_refused(keys, text):
    with pytest.raises(CannotAnswerError, match=text):
        compiled(Freeze(last_layers=2), **keys)


def test_a_change_to_adapters_freezes_all_else():
    config = replace(FULL, freeze=Freeze(last_layers=2))
    assert Change("", (("adapter.kind", "lora"),)).apply(config).freeze == Freeze()


def test_a_search_counts_the_gradients_of_what_trains():
    space = full_space(replace(FULL, freeze=Freeze(last_layers=2)), CATALOG, (1,))
    device = Device(CATALOG.gpus["rtx-4090"], "rtx4090")
    search = Search(MODEL, space, device, 512, CATALOG, experimental=False)
    states = search.sizes.states(search.sizes.setup(next(space.states(CATALOG))))
    trained = [entry.tensor for entry in states.tensors if entry.trainable]
    assert parameter_count(trained) == compiled(Freeze(last_layers=2)).states.gradient_bytes // 2


def test_answers_say_what_trains(cli):
    arguments = ("fit", "qwen2.5-0.5b", "--gpu", "rtx4090", "--config", "bf16-adamw", "--stack", "transformers", "-v")
    out = " ".join(cli(*arguments, "--set", "freeze.last_layers=2", "--set", "freeze.parts=[mlp]").out.split())
    assert "frozen but for mlp of the last 2 layers: 26,148,864 of 494,032,768 parameters train" in out
