"""Adapters in a trace: computed as PEFT computes them, refused as the formula refuses them."""

import pytest
import torch

from memplan.catalog.training_config import Adapter, TrainingConfig
from memplan.errors import InvalidFileError
from memplan.plan.planner import CompiledPlan
from memplan.trace.reference.parts import Linear
from memplan.trace.reference.run_options import ReferenceOptions, Runtime
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.survey.agreement import compare, cut_model

SCALING = 2.0


def peft_dora(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """DoRA in weight space: rescale each output of ``W + BA`` to its magnitude, and add the bias.

    https://arxiv.org/abs/2402.09353, equation 5.
    """
    (part,) = layer._adapter
    weight = layer.stored.tensor.T if layer.transposed else layer.stored.tensor
    whole = weight + SCALING * part.up @ part.down
    directed = part.magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True)
    # The forward of PEFT scales by ``magnitude / norm`` what the weight contributes.
    return x @ directed.T + (0 if layer.bias is None else layer.bias)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_dora_is_that_of_its_paper(transposed, bias):
    torch.manual_seed(0)
    options = ReferenceOptions(compute_dtype=torch.float32, adapter=Adapter("dora", 4, dtype="fp32"))
    layer = Linear(12, 20, Runtime(options), torch.device("cpu"), bias=bias, transposed=transposed)
    layer.adapt(Adapter("dora", 4, dtype="fp32"), torch.device("cpu"))
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.normal_()
    x = torch.randn(3, 20)
    torch.testing.assert_close(layer(x), peft_dora(layer, x))


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5-0.5b"])
@pytest.mark.parametrize("keys", [{}, {"weights": {"default": "fp32"}}, {"adapter": Adapter("dora", dtype="fp32")}])
def test_dora_beside_biases_and_transposed_weights_is_the_formulas_too(catalog, name, keys):
    config = TrainingConfig("", sequence_length=512, **({"adapter": Adapter("dora")} | keys))
    assert compare("dora", cut_model(name, catalog), config, catalog).difference_bytes == 0


def test_a_target_that_is_no_projection_is_refused_in_the_formulas_words(make_model, catalog):
    model = make_model("phi-3-mini")
    setup = resolve(TrainingConfig("", adapter=Adapter(targets=("q_proj", "v_proj"))), catalog, "test")
    with pytest.raises(InvalidFileError) as planned:
        CompiledPlan(model, setup)
    with pytest.raises(InvalidFileError) as traced:
        trace_training(model, setup)
    assert "'q_proj' is no projection" in str(traced.value)
    assert str(traced.value) == str(planned.value)


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "mistral-7b-v0.1"])
def test_fp8_weights_are_decoded_for_every_product_in_the_trace_too(catalog, name):
    """The embedding, the head tied to it and the logits are in the compute dtype."""
    config = TrainingConfig("", sequence_length=512, weights={"default": "fp8-e4m3"}, adapter=Adapter())
    found = compare("fp8", cut_model(name, catalog), config, catalog)
    assert abs(found.difference_bytes) <= 0.001 * found.traced_bytes
