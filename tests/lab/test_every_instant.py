"""Each instant of the formula is that of the trace, to the byte: not the peak alone, and at lengths beside every threshold."""

from dataclasses import replace

import pytest

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import CheckpointedLayers, TrainingConfig
from memplan.errors import MemplanError
from memplan.model.model import Model
from memplan.model.spec import Attention, Layer, LayerRun, Mlp, ModelSpec, Norm
from memplan.plan.planner import CompiledPlan
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.trace.recording.workspaces import kernel_workspaces
from memplan.training.resolution.resolve_config import resolve
from tests.survey.agreement import compare


def narrow(heads: int = 4, groups: int = 2, width: int = 64, vocab: int = 96, layers: int = 2) -> Model:
    """A Llama whose attention outweighs its MLP and its head, so that instants are attention's."""
    layer = Layer(Attention(heads, groups, width, width), Mlp(8), Norm())
    spec = ModelSpec("narrow", "llama", vocab, 32, (LayerRun(layer, layers),), Norm())
    return Model.from_spec(spec, "test")


def differing(model: Model, config: TrainingConfig, catalog) -> set[str]:
    """Instants that formula and trace give other bytes; of forward the formula knows the end alone."""
    return set(compare("instants", model, config, catalog).differences) - {"forward"}


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 127), (2, 129), (5, 3)])
def test_instants_at_odd_lengths(catalog, attention, batch, length):
    config = TrainingConfig(
        "", micro_batch_size=batch, sequence_length=length, kernels=Kernels(attention=attention, norm="composite")
    )
    assert differing(narrow(), config, catalog) == set()


@pytest.mark.parametrize("layers", [CheckpointedLayers(every=2), CheckpointedLayers(first=3), CheckpointedLayers(3, 4)])
def test_some_layers_alone_are_computed_again(catalog, layers):
    config = TrainingConfig("", sequence_length=129, activation_checkpointing="full", checkpointed_layers=layers)
    model = narrow(layers=5)
    assert differing(model, config, catalog) == set()
    everywhere = replace(config, checkpointed_layers=CheckpointedLayers())
    ways = (everywhere, config, replace(everywhere, activation_checkpointing="none"))
    needs = [CompiledPlan(model, resolve(way, catalog, "test")).requested_bytes(1, 129) for way in ways]
    assert needs[0] < needs[1] < needs[2]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"activation_checkpointing": "selective"}, "it counts where activation_checkpointing is full"),
        ({"activation_checkpointing": "full", "stack": "trl"}, "not modelled for stack trl"),
        ({"activation_checkpointing": "full", "stack": "megatron"}, "not modelled for stack megatron"),
        ({"checkpointed_layers": CheckpointedLayers(every=0)}, "expected a whole number from 1 to 65,536, got 0"),
    ],
)
def test_layers_that_cannot_be_chosen_are_refused(catalog, keys, words):
    config = TrainingConfig("", **{"checkpointed_layers": CheckpointedLayers(first=1), **keys})
    with pytest.raises(MemplanError, match=words):
        resolve(config, catalog, "test")


@pytest.mark.parametrize("keys", [{}, {"kernels": Kernels(loss="bf16")}, {"zero_gradients": "fill"}], ids=str)
def test_evaluation_holds_hidden_states_and_logits(catalog, keys):
    config = TrainingConfig("", micro_batch_size=3, sequence_length=65, evaluation=True, **keys)
    model = narrow(vocab=4000)
    plan = CompiledPlan(model, resolve(config, catalog, "test"))
    assert "evaluation" in {instant.name for instant in plan.candidates}
    assert differing(model, config, catalog) == set()


@pytest.mark.parametrize(("length", "padded"), [(1, 128), (127, 128), (128, 128), (129, 256), (257, 384)])
def test_flash_attention_pads_lengths_to_a_hundred_and_twenty_eight(catalog, length, padded):
    """By hand, from mha_bwd in flash_api.cpp: softmax_d and dq_accum, 1 + 64 fp32 numbers for each head and padded token."""
    plan = CompiledPlan(narrow(), resolve(TrainingConfig("", sequence_length=length), catalog, "test"))
    attention = [instant for instant in plan.candidates if "attention" in instant.operation and "layer" in instant.name]
    values = plan.values(1, length)
    scratch = [
        sum(values[q] * instant.form.coefficient(part, q) for part in Part for q in (Quantity.PADDED_TOKENS,))
        for instant in attention
    ]
    assert set(scratch) == {4 * 4 * (1 + 64) * padded}


@pytest.mark.parametrize(("tokens", "sorted_tokens"), [(3071, 0), (3072, 0), (3073, 3073)])
def test_the_embeddings_backward_sorts_beyond_3072_tokens(catalog, tokens, sorted_tokens):
    """Embedding.cu: ``num_indices <= 3072`` takes the kernel without sorting."""
    import torch

    vocab, width = 96, 32
    touched = min(sorted_tokens, vocab)
    parts = sorted_tokens // 10 + touched
    expected = 24 * sorted_tokens + 16 * touched + (8 + 4 * width) * parts
    rows, index = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((tokens, width), torch.bfloat16), ((tokens,), torch.long))
    )
    assert sum(kernel_workspaces("embedding_dense_backward.default", (rows, index, vocab, -1, False))) == expected
    plan = CompiledPlan(narrow(), resolve(TrainingConfig("", sequence_length=tokens), catalog, "test"))
    names = (Quantity.SORTED_TOKENS, Quantity.TOUCHED_ROWS, Quantity.PARTIAL_SUMS)
    assert tuple(plan.values(1, tokens)[name] for name in names) == (sorted_tokens, touched, parts)


@pytest.mark.parametrize("name", ["adafactor", "lion", "adam-mini", "adamw-8bit-bnb"])
def test_the_optimizer_step_is_what_the_optimizers_own_code_allocates(catalog, name):
    """Matrices far larger than activations, so that the step is told apart."""
    layer = Layer(Attention(4, 2, 64, 64), Mlp(400), Norm())
    model = Model.from_spec(ModelSpec("wide", "llama", 96, 256, (LayerRun(layer, 2),), Norm()), "test")
    config = TrainingConfig("", sequence_length=16, optimizer={"default": name})
    found = compare(name, model, config, catalog)
    assert "optimizer step" not in found.differences, found.differences
