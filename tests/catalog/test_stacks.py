"""Stacks: every file is complete and sourced, names real keys, and older versions are told from newer ones."""

from dataclasses import MISSING, fields, replace
from typing import get_args, get_type_hints

import pytest

import memplan
from memplan.catalog.catalog import data_directory
from memplan.catalog.config_keys.method_keys import Embedding
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import KernelProfile, Kernels
from memplan.catalog.stack_versions import with_stack
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import load_document
from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError, UnknownNameError
from memplan.library.lookup import Overrides, find_setup
from memplan.library.lookup.model_lookup import catalog_model
from memplan.model.inventory import ROLES
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
NAMES = list(CATALOG.stacks)
KNOWN = (
    "bundled", "plain-loop", "transformers", "trl", "axolotl", "llama-factory", "unsloth", "torchtune", "torchtitan",
    "litgpt", "nanochat", "nanogpt", "megatron", "deepspeed",
)  # fmt: skip
SECTIONS_OF_A_CONFIG = ("weights", "optimizer")
"""Keys of a training config whose own keys are roles."""


def document(name):
    return load_document(data_directory() / "configs" / "stacks" / f"{name}.yaml")


def test_the_stacks_that_people_use_are_there():
    assert set(KNOWN) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_says_every_key_and_where_each_was_read(name):
    data = document(name).data
    required = {field.name for field in fields(Stack) if field.default is MISSING and field.default_factory is MISSING}
    assert required <= set(data)
    assert set(data["kernels"]) == {field.name for field in fields(KernelProfile)}
    stack = CATALOG.stacks[name]
    assert stack.sources
    assert all(source.url.startswith("https://") and source.checked for source in stack.sources)
    assert all(covered in data or covered == "history" for source in stack.sources for covered in source.covers)
    assert all(stack.versions.values())
    assert stack.description
    assert stack.library


def is_key(path, cls=TrainingConfig):
    head, _, rest = path.partition(".")
    names = {field.name: field for field in fields(cls)}
    if head in SECTIONS_OF_A_CONFIG:
        return rest in {*ROLES, "default"} or (head == "optimizer" and not rest)
    if head not in names:
        return False
    if not rest:
        return True
    if path.startswith("method.embedding."):
        return rest.partition(".")[2] in {field.name for field in fields(Embedding)}
    inner = {
        "kernels": "Kernels",
        "adapter": "Adapter",
        "parallel": "Parallel",
        "offload": "Offload",
        "gradients": "Gradients",
    }
    module = __import__("memplan.catalog.training_config", fromlist=["x"])
    return head in inner and rest in {field.name for field in fields(getattr(module, inner[head]))}


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_of_a_stack_are_those_of_a_training_config(name):
    stack = CATALOG.stacks[name]
    assert [key for key in stack.keys if not is_key(key)] == []
    assert set(stack.values) <= set(stack.keys)
    assert list(stack.keys) == sorted(stack.keys)
    assert all(own for values in stack.values.values() for own in values.values())


def test_a_made_up_key_is_none():
    assert not is_key("micro_batch")
    assert not is_key("kernels.atention")
    assert is_key("weights.hidden_matrix")


@pytest.mark.parametrize("config", ["qlora", "lora", "bf16-adamw", "mixed-adamw"])
@pytest.mark.parametrize("name", NAMES)
def test_a_stack_plans_a_job_or_says_why_not(name, config):
    refusal = ""
    try:
        setup = find_setup(config, Overrides(stack=name), CATALOG)
        plan = CompiledPlan(catalog_model("llama-3.2-1b", CATALOG), setup).evaluate(
            Device(CATALOG.gpus["h100"], "h100")
        )
    except (CannotAnswerError, InvalidFileError) as error:
        refusal = str(error)
    if refusal:
        assert name != "bundled"
        assert config in refusal
        assert len(refusal) > 40
    else:
        assert plan.setup.stack.name == name
        assert plan.device_bytes > plan.persistent_bytes > 0


# ------------------------------------------------------------------ versions
@pytest.mark.parametrize(
    ("given", "loss"),
    [
        ("trl", "fused-head"),
        ("trl@1.16.0", "fused-head"),
        ("trl@1.15", "fused-head"),
        ("trl@1.14.2", "token-chunks"),
        ("trl@1.12.0", "token-chunks-fp32"),
        ("trl@1.7", "token-chunks-fp32"),
        ("trl@1.6.0", "fp32"),
        ("trl@1.3", "fp32"),
        ("TRL@1.3", "fp32"),
    ],
)
def test_the_loss_of_trl_by_version(given, loss):
    stack = CATALOG.stack(given)
    assert stack.kernels.loss == loss
    assert stack.name == "trl"
    assert stack.label == f"trl {given.partition('@')[2] or '1.16.0'}"


def test_a_version_changes_nothing_else():
    new, old = CATALOG.stack("transformers"), CATALOG.stack("transformers@4.57.1")
    assert (new.checkpointing.reentrant, old.checkpointing.reentrant) == (False, True)
    assert (new.kernels, new.keys, new.sources) == (old.kernels, old.keys, old.sources)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("tlr", UnknownNameError, "unknown stack 'tlr'; did you mean 'trl'?"),
        ("trl@2.0", CannotAnswerError, "trl@2.0 is newer than 1.16.0"),
        ("trl@0.7", CannotAnswerError, "trl@0.7 is older than 0.8"),
        ("trl@latest", InvalidFileError, "expected a version such as trl@1.14"),
        ("nanogpt@1.0", CannotAnswerError, "nanogpt@1.0 is not described; 3adf61e1"),
    ],
)
def test_an_unknown_stack_or_version_is_refused(given, error, words):
    with pytest.raises(error, match=words):
        CATALOG.stack(given)


# ------------------------------------------------------------------ what a config leaves to its stack
def test_what_a_config_does_not_say_is_as_its_stack_has_it():
    setup = resolve(TrainingConfig("mine", stack="trl"), CATALOG, "mine")
    assert setup.checkpointing == "full"
    assert setup.config.clip_gradients is True
    assert setup.profile.loss == "fused-head"


def test_what_a_config_says_stands():
    config = TrainingConfig("mine", stack="trl", activation_checkpointing="none", clip_gradients=False)
    setup = resolve(config, CATALOG, "mine")
    assert (setup.checkpointing, setup.config.clip_gradients) == ("none", False)


def test_a_stack_that_casts_beforehand_refuses_autocast():
    config = TrainingConfig("mine", stack="megatron", weights={"default": "fp32"})
    with pytest.raises(InvalidFileError, match="which megatron does not run; use weights: bf16"):
        resolve(config, CATALOG, "mine")


def test_a_config_says_by_which_checkpointing_layers_run_again():
    def setup(stack, **more):
        return resolve(TrainingConfig("mine", stack=stack, **more), CATALOG, "mine").stack.checkpointing.reentrant

    assert [setup("trl"), setup("trl", reentrant_checkpointing=True)] == [False, True]
    assert [setup("llama-factory"), setup("llama-factory", reentrant_checkpointing=False)] == [True, False]
    with pytest.raises(InvalidFileError, match="torchtitan has no key that switches it"):
        setup("torchtitan", reentrant_checkpointing=True)
    with pytest.raises(InvalidFileError, match="computes all of a layer again"):
        setup("trl", reentrant_checkpointing=True, activation_checkpointing="selective")
    balanced = replace(TrainingConfig("mine").method, balances=True)
    assert setup("trl", method=balanced) is False
    with pytest.raises(InvalidFileError, match=r"method\.balances: bundled .* adds no loss of unbalanced experts"):
        setup("bundled", method=balanced)


def test_litgpt_evaluates_as_many_rows_as_it_trains_on():
    def rows(stack, **more):
        return resolve(TrainingConfig("mine", stack=stack, evaluation=True, **more), CATALOG, "mine").config

    assert rows("litgpt", micro_batch_size=4, evaluation_batch_size=4).evaluation_batch_size == 4
    assert rows("transformers", evaluation_batch_size=8).evaluation_batch_size == 8
    with pytest.raises(InvalidFileError, match="evaluates as many rows as it trains on"):
        rows("litgpt", evaluation_batch_size=8)


def test_litgpt_steps_adapters_over_codes_by_bitsandbytes_paged_adamw():
    def optimizer(*settings):
        return find_setup("qlora", Overrides(stack="litgpt", settings=settings), CATALOG).optimizer_names[
            "hidden_matrix"
        ]

    assert optimizer() == optimizer("optimizer.default=adamw-paged-bnb") == "adamw-paged-bnb"
    for format_name in ("nf4", "nf4-double-quant"):
        with pytest.raises(InvalidFileError, match="by adamw-paged-bnb alone, and not by adamw-bf16"):
            optimizer("optimizer.default=adamw-bf16", f"weights.hidden_matrix={format_name}")
    settings = {"weights.hidden_matrix": "nf4-torchao", "optimizer": "adamw-bf16"}
    with pytest.raises(CannotAnswerError, match="use one of nf4, nf4-dq there"):
        memplan.plan("llama-8b", gpu="h100", config="qlora", stack="litgpt", set=settings)


def test_torchs_adamw_has_states_as_wide_as_what_it_steps_under_transformers_stacks():
    def optimizers(config, *settings, stack="trl"):
        return set(find_setup(config, Overrides(stack=stack, settings=settings), CATALOG).optimizer_names.values())

    assert optimizers("lora", "optimizer.default=adamw-bf16") == {"adamw-fp32"}
    assert optimizers("bf16-adamw", "weights.default=fp32") == {"adamw-fp32"}
    assert optimizers("bf16-adamw", "optimizer.default=adamw-fp32") == {"adamw-bf16"}
    assert optimizers("bf16-adamw", "weights.default=fp32", stack="bundled") == {"adamw-bf16"}
    assert "adamw-fp32" in optimizers("muon", stack="transformers")  # of Muon, which steps the rest too


@pytest.mark.parametrize("until", ["forward", "backward", "step", "next", None])
def test_a_config_says_until_when_a_loop_has_a_name_for_outputs(until):
    config = TrainingConfig("mine", stack="plain-loop", outputs_until=until)
    loop = resolve(config, CATALOG, "mine").stack.loop
    assert (loop.holds, loop.until) == (
        () if until == "forward" else ("logits",),
        {"forward": "next"}.get(until, until or "next"),
    )


def test_the_loop_of_a_library_or_of_several_gpus_is_not_told_until_when_it_names_outputs():
    with pytest.raises(InvalidFileError, match="trl has a loop of its own, which settles that"):
        resolve(TrainingConfig("mine", stack="trl", outputs_until="step"), CATALOG, "mine")
    with pytest.raises(InvalidFileError, match="planned on one GPU"):
        resolve(
            TrainingConfig("mine", stack="plain-loop", outputs_until="step", parallel=Parallel(data=2)), CATALOG, "mine"
        )


# ------------------------------------------------------------------ kernel presets of before
def test_a_config_of_before_is_refused_with_the_line_to_write(cli, write):
    path = write("old.yaml", "description: old\nkernels: {preset: hf-transformers, loss: chunked}\n")
    ran = cli("fit", "gpt2", "--gpu", "t4", "--config", path)
    assert ran.exit_code == 2
    assert "old.yaml:2: kernels.preset: kernel presets are part of stacks now; write stack: transformers" in ran.err


def test_a_record_of_before_is_read_with_the_stack_in_place_of_its_preset():
    training = {"kernels": {"preset": "bundled", "loss": "bf16"}, "micro_batch_size": 2}
    assert with_stack(training) == {"kernels": {"loss": "bf16"}, "micro_batch_size": 2, "stack": "bundled"}
    assert with_stack({"micro_batch_size": 2}) == {"micro_batch_size": 2}


CHOSEN = ("attention", "norm", "rotary", "activation", "loss", "adapters")
OTHERS = {key: get_args(get_type_hints(KernelProfile)[key]) for key in CHOSEN}


@pytest.mark.parametrize("name", [name for name in CATALOG.stacks if name != "megatron"])
def test_a_kernel_that_a_stack_does_not_say_that_it_runs_is_refused(name):
    """``fit`` answered for some forty kernels that nothing of a stack calls, as though it did."""
    stack, config = CATALOG.stack(name), CATALOG.configs["bf16-adamw"]
    assert set(stack.runs) <= set(CHOSEN)
    for key, words in OTHERS.items():
        own = {getattr(stack.kernels, key), *stack.runs.get(key, ())}
        assert own <= set(words), (key, own)
        for word in set(words) - own:
            given = replace(config, stack=name, kernels=Kernels(**{key: word}))
            with pytest.raises(MemplanError, match=rf"kernels\.{key}"):
                resolve(given, CATALOG, name)


@pytest.mark.parametrize("name", [name for name in NAMES if CATALOG.stacks[name].model_code == "transformers"])
def test_models_are_those_of_the_transformers_that_a_stack_names(name):
    """A stack that was described with an older transformers has its models, and not those of the newest."""
    stack = CATALOG.stacks[name]
    own = CATALOG.stack(f"plain-loop@{stack.versions['transformers']}").models
    for key in ("own_positions", "hands_unread", "wide_routers", "returns_features"):
        assert getattr(stack.models, key) == getattr(own, key), key
