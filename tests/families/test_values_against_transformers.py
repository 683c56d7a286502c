"""With the same weights, memplan's reference model and transformers' compute the same numbers, family by family.

Both sides of the formula's proof, formula and trace, take a model's arithmetic from its :class:`ModelSpec`;
what neither knows would go unseen. Logits and every gradient, in fp32 on the CPU, show it.
"""

from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from .tiny import CASES, OWN_CASES  # noqa: E402
from .twins import (  # noqa: E402
    copy_weights,
    looked_up,
    outcome,
    randomise,
    real_model,
    reference_model,
    reordered,
    rotary_tables,
    spec_of,
    tables_of,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-4
ROUNDING = 1e-6
"""Of the largest gradient: what sums in fp32 leave of one that is zero."""


def outcomes(case, spec, change=None):
    """Logits and gradients of transformers' model, and of the reference model of ``spec``, with the same weights."""
    torch.set_num_threads(1)
    real, ids = real_model(*CASES[case]), tokens(spec)
    randomise(real)
    if change is not None:
        change(real)
    with rotary_tables(real) as found:
        logits, gradients = outcome(real, real(input_ids=ids, use_cache=False).logits)
    reference = reference_model(spec)
    copy_weights(spec, real, reference)
    positions = torch.arange(ids.shape[1])[None] + spec.reserved_positions
    keeps_tables = getattr(spec.runs[0].layer.attention, "position_rows", 0)
    tables = looked_up(spec) if keeps_tables else tables_of(found)
    own = outcome(reference, reference.logits(ids, (tables,), positions))
    return (logits, {name: reordered(spec, name, tensor) for name, tensor in gradients.items()}), own


def distance(expected, given):
    """Return the largest difference, in terms of the largest number."""
    return float((expected - given).abs().max() / expected.abs().max().clamp(min=1e-3))


def disagreements(case, spec, change=None):
    """Return what differs: ``logits`` and names of parameters whose gradients do."""
    (logits, gradients), (own_logits, own_gradients) = outcomes(case, spec, change)
    found = {} if (apart := distance(logits, own_logits)) <= TOLERANCE else {"logits": apart}
    rounding = ROUNDING * max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        if max(float(x.abs().max()) for x in (gradient, own_gradients[name])) <= rounding:
            continue  # both are zero: a key's bias moves all scores of a query alike
        if (apart := distance(gradient, own_gradients[name])) > TOLERANCE:
            found[name] = apart
    return found


@pytest.mark.parametrize("case", OWN_CASES)
def test_logits_and_gradients_equal_those_of_transformers(case):
    assert not disagreements(case, spec_of(case))


def with_layers(spec, **changes):
    return replace(spec, runs=tuple(replace(run, layer=replace(run.layer, **changes)) for run in spec.runs))


def attention_of(spec, **changes):
    return with_layers(spec, attention=replace(spec.runs[0].layer.attention, **changes))


def feed_forward_of(spec, **changes):
    part = replace(spec.runs[-1].layer.feed_forward, **changes)
    runs = [
        r if type(r.layer.feed_forward) is not type(part) else replace(r, layer=replace(r.layer, feed_forward=part))
        for r in spec.runs
    ]
    return replace(spec, runs=tuple(runs))


WRONG = {
    "norm-epsilon": ("llama", lambda spec: with_layers(spec, norm=replace(spec.final_norm, epsilon=1e-3))),
    "attention-scale": ("qwen3", lambda spec: attention_of(spec, scale=0.3)),
    "attention-soft-cap": ("gemma2", lambda spec: attention_of(spec, logit_softcap=5.0)),
    "logit-soft-cap": ("gemma2", lambda spec: replace(spec, final_logit_softcap=20.0)),
    "embedding-scale": ("gemma", lambda spec: replace(spec, embedding_scale=7.0)),
    "partly-rotated": ("phi", lambda spec: attention_of(spec, rotary_dim=0)),
    "activation": ("llama", lambda spec: feed_forward_of(spec, activation="gelu")),
    "placement": ("llama", lambda spec: with_layers(spec, placement="parallel", parallel_norms=2)),
    "scores-divided": ("qwen3-moe", lambda spec: feed_forward_of(spec, normalised=True)),
    "score-scale": ("deepseek-v3", lambda spec: feed_forward_of(spec, score_scale=1.0)),
    "softmax-of-all": ("gpt-oss", lambda spec: feed_forward_of(spec, softmax_of_chosen=False, normalised=False)),
    "groups-of-experts": ("deepseek-v3", lambda spec: feed_forward_of(spec, groups=1)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_spec_is_seen(wrong):
    case, changed = WRONG[wrong]
    assert disagreements(case, changed(spec_of(case)))


def test_a_residual_multiplier_that_neither_spec_nor_formula_knows_is_seen():
    def with_multiplier(real):
        for layer in real.model.layers:
            layer.mlp.register_forward_hook(lambda module, inputs, out: 0.95 * out)

    assert "logits" in disagreements("llama", spec_of("llama"), with_multiplier)
