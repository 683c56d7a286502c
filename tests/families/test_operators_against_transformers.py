"""Forward and backward of the reference model run the operators of transformers' model, family by family.

Both run on tensors without memory, in bf16, by the same attention kernel; what is left apart is what one of
:data:`DELIBERATE` says, with its reason.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from memplan.catalog.kernel_profiles import KernelProfile  # noqa: E402
from memplan.model.spec import Attention, ModelSpec  # noqa: E402
from memplan.trace.jobs.reference_job import batch_of  # noqa: E402
from memplan.trace.pretended_cuda.cuda_kernels import cuda_kernels  # noqa: E402
from memplan.trace.reference.decoder import ReferenceModel  # noqa: E402
from memplan.trace.reference.run_options import ReferenceOptions  # noqa: E402
from memplan.trace.transformers_models import without_packing  # noqa: E402

from .operators import Operators, difference, inside  # noqa: E402
from .test_values_against_transformers import attention_of, feed_forward_of, with_layers  # noqa: E402
from .tiny import CASES, OWN_CASES  # noqa: E402
from .twins import BATCH, NEIGHBOURS, TOKENS, real_config, spec_of  # noqa: E402

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

PROFILE = KernelProfile(norm="composite")
"""Norms step by step, as transformers writes them; the other kernels are the lab's."""

WITHOUT_KERNEL = ("gpt_neo",)
"""Families that transformers runs attention of step by step alone (``_supports_sdpa`` of ``GPTNeoPreTrainedModel``)."""

Key = tuple[Any, ...]


def part_of(spec: ModelSpec) -> Any:
    return spec.runs[0].layer.attention


def steps_through_scores(spec: ModelSpec) -> bool:
    part = part_of(spec)
    return isinstance(part, Attention) and (part.sinks or part.logit_softcap > 0)


def rotated(spec: ModelSpec) -> int:
    parts = [run.layer.attention for run in spec.runs]
    return max(part.rotary_dim if isinstance(part, Attention) else part.qk_rope_head_dim for part in parts)


def stream(spec: ModelSpec) -> tuple[int, int]:
    """Return the shape of the residual stream, of which no rule hides a sum, or a product but by a family's own factor."""
    return BATCH * TOKENS, spec.hidden_size


def of_rotation(spec: ModelSpec, key: Key) -> bool:
    """Sums and products of rotated dimensions, or half of them; none is of the residual stream."""
    name, shape, _, *numbers = key
    width = rotated(spec)
    turns = name in ("add", "mul", "sub", "neg") and bool({width, width // 2} & set(shape)) and shape != stream(spec)
    return name in ("cat", "stack") or (turns and set(numbers) <= {1.0})


def of_fused_rows(spec: ModelSpec, key: Key) -> bool:
    """Sums of gradients of parts of a fused projection, and joining them."""
    part = part_of(spec)
    fused = part.query_size + 2 * part.key_value_size
    name, shape = key[0], key[1]
    size = torch.Size(shape).numel()
    whole = {
        BATCH * TOKENS * fused,
        *(BATCH * TOKENS * 2 * run.layer.feed_forward.intermediate_size for run in spec.runs),
    }
    halves = {
        BATCH * TOKENS * part.num_heads * part.rotary_dim,
        BATCH * TOKENS * part.num_key_value_heads * part.rotary_dim,
    }
    return name == "cat" or (name == "add" and len(key) == 3 and size in whole | halves)


def of_falcon(spec: ModelSpec, key: Key) -> bool:
    name, shape = key[0], key[1]
    apart = ("mm", "addmm", "add") if part_of(spec).qkv_bias else ()
    if shape == stream(spec) and name not in apart:
        return False
    kernels = ("attention", "attention_backward", "_scaled_dot_product_efficient_attention")
    copies = ("index", "index_put", "sum", "cat", "masked_fill", "mm", "addmm", "neg", "add", "mul")
    return name in (*kernels, f"{kernels[-1]}_backward", *copies) and len(key) <= 4


def of_centred_norm(spec: ModelSpec, key: Key) -> bool:
    """What forms a layer norm in fp32, operation by operation, and the kernel that does so at once."""
    shapes = (stream(spec), (BATCH * TOKENS,), (spec.hidden_size,))
    return key[0].startswith("native_layer_norm") or (key[1] in shapes and key[2] is not torch.bfloat16)


def of_gelu_new(spec: ModelSpec, key: Key) -> bool:
    """What forms a GELU by its tanh, operation by operation, and the kernel that does so at once."""
    names = ("add", "mul", "pow", "tanh", "tanh_backward", "gelu", "gelu_backward")
    return key[0] in names and key[1] == (BATCH * TOKENS, spec.runs[0].layer.feed_forward.intermediate_size)


def of_logit_scale(spec: ModelSpec, key: Key) -> bool:
    """Logits and their gradient divided by a factor, or multiplied by the inverse of the same."""
    name, shape, _, *numbers = key
    factors = {"div": [round(1 / spec.logit_scale, 6)], "mul": [round(spec.logit_scale, 6)]}
    return shape == (BATCH * TOKENS, spec.vocab_size) and factors.get(name) == numbers


def of_scaled_projection(spec: ModelSpec, key: Key) -> bool:
    """Queries, and their gradient, times the factor of scores; attention scaled by one, or by that factor."""
    name, shape, _, *numbers = key
    factor = round(part_of(spec).head_dim ** -0.5, 6)
    if name == "attention":
        return numbers in ([1.0], [factor])
    return name == "mul" and shape == (BATCH * TOKENS, part_of(spec).query_size) and numbers == [factor]


def of_counted_positions(spec: ModelSpec, key: Key) -> bool:
    """Positions counted in a mask of ones, and looked up for each token; or looked up once for all sequences."""
    name, shape, dtype, *numbers = key
    if shape == (BATCH * TOKENS,) and dtype is torch.float32:
        return (name, *numbers) in (("cumsum",), ("mul",), ("sub", 1.0))
    once = (TOKENS, spec.hidden_size)
    return not numbers and (name, shape) in (("embedding", stream(spec)), ("embedding", once), ("sum", once))


def of_unscaled_scores(spec: ModelSpec, key: Key) -> bool:
    """Attention step by step, its scores in fp32 and not scaled, and the kernel that is given a factor of one."""
    name, shape, dtype, *numbers = key
    part, pairs = part_of(spec), (TOKENS, BATCH * TOKENS)
    if name in ("attention", "attention_backward"):
        return numbers == ([1.0] if name == "attention" else [])
    if numbers:
        return False
    if name == "bmm":
        products = ((TOKENS, TOKENS), (TOKENS, part.head_dim))
        return shape in [tuple(sorted((BATCH * part.num_heads, *sizes))) for sizes in products]
    if (name, shape) == ("where", pairs):
        return dtype is torch.bfloat16  # the model's mask
    steps = ("add", "where", "softmax", "_softmax_backward_data")
    return name in steps and shape == tuple(sorted((part.num_heads, *pairs))) and dtype is torch.float32


@dataclass(frozen=True)
class Rule:
    """Operators that differ on purpose.

    Attributes:
        families: Whose.
        covers: Tells whether an operator is one of them.
        reason: Why it may differ.
    """

    families: tuple[str, ...]
    covers: Callable[[ModelSpec, Key], bool]
    reason: str


DELIBERATE = (
    Rule(
        ("gemma", "gemma2", "gemma3_text"),
        lambda spec, key: (key[:2], key[3:]) in {(("mul", stream(spec)), n) for n in ((), (spec.hidden_size**0.5,))},
        "the scale of the embeddings is a tensor without dimensions there, a number here; values are compared elsewhere",
    ),
    Rule(
        ("gemma2", "gpt_oss"),
        lambda spec, key: key[0] in ("add", "masked_fill", "where") and key[1][-2:] == (TOKENS, BATCH * TOKENS),
        "a mask is added there and filled in here, which has a gradient of its own: as many bytes at each moment",
    ),
    Rule(
        ("phi", "gpt2", "gpt_neo", "gptj"),
        of_gelu_new,
        "gelu_new is eight operators in transformers, one kernel here (NewGELUActivation in activations.py)",
    ),
    Rule(
        ("gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "minimax_m2", *NEIGHBOURS),
        of_rotation,
        "halves, interleaved pairs or complex numbers are rotated there, halves that are formed as tensors here",
    ),
    Rule(
        ("minimax_m2",),
        lambda spec, key: key[:3] == ("add", (BATCH * TOKENS,), torch.float32),
        "a number that changes nothing is added to the sum of the chosen experts' scores here, not there",
    ),
    Rule(
        ("ministral3",),
        lambda spec, key: key[1] == (TOKENS,),
        "factors of the queries are formed from the numbers of the positions there, and are ones here",
    ),
    Rule(
        ("cohere", "cohere2"),
        of_centred_norm,
        "a layer norm is a dozen operators in fp32 there, one kernel here",
    ),
    Rule(
        ("glm4_moe",),
        lambda spec, key: key[0] == "mul" and BATCH * TOKENS in key[1] and key[2:] == (torch.float32, 1.0),
        "scores of the chosen experts are multiplied by a factor of one there, which is left out here",
    ),
    Rule(
        ("granite", "granitemoe"),
        of_logit_scale,
        "logits are divided there, and multiplied by the inverse here",
    ),
    Rule(
        ("phi3", "glm", "glm4"),
        of_fused_rows,
        "parts of a fused projection are sliced there, which fills a gradient for each with zeros; split here",
    ),
    Rule(
        ("falcon",),
        of_falcon,
        "Falcon copies and repeats keys and values out of the fused projection, gives the kernel a mask, which only "
        "the efficient one takes, and adds biases apart; the planner has the fused product and the kernel asked for",
    ),
    Rule(
        ("opt",),
        of_scaled_projection,
        "queries are scaled as they are projected there, and attention by one (OPTAttention.forward in "
        "opt/modeling_opt.py); the kernel scales scores here",
    ),
    Rule(
        ("opt",),
        of_counted_positions,
        "each token has a position of its own there, counted in a mask of padding (OPTLearnedPositionalEmbedding.forward "
        "in opt/modeling_opt.py); all sequences share one row of them here",
    ),
    Rule(
        ("gpt_neo",),
        of_unscaled_scores,
        "attention is step by step there, with queries and keys in fp32 (GPTNeoSelfAttention._attn in "
        "gpt_neo/modeling_gpt_neo.py); here it is the kernel, which keeps scores in fp32 and is told to scale them by one",
    ),
)


WIDER = {
    "olmo": "norms and rotated positions are computed in fp32 there, in the compute dtype here",
    "olmo2": "scales of norms and rotated positions are multiplied in fp32 there, in the compute dtype here",
    "olmo3": "scales of norms and rotated positions are multiplied in fp32 there, in the compute dtype here",
    "gpt_oss": "scales of norms are multiplied in fp32 there, in the compute dtype here",
}
"""Families whose operators are equal but for dtypes, with the reason."""


@cache
def real_operators(case: str) -> Operators:
    config = real_config(*CASES[case])
    config.pad_token_id = None  # else GPT-2 looks for padding, in values that there are none of
    steps = steps_through_scores(spec_of(case)) or CASES[case][0] in WITHOUT_KERNEL
    attention = "eager" if steps else "sdpa"
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    real = real.to(torch.bfloat16).eval()
    ids = torch.zeros((BATCH, TOKENS), dtype=torch.long, device="meta")
    operators = Operators(BATCH, TOKENS, inside(real, frozenset({"rotary_emb"})))
    with without_packing(), cuda_kernels(PROFILE), operators:
        logits = real(input_ids=ids, use_cache=False).logits
        logits.backward(torch.empty_like(logits))
    return operators


@cache
def reference_operators(spec: ModelSpec) -> Operators:
    options = ReferenceOptions(profile=PROFILE)
    model, batch = ReferenceModel(spec, options).eval(), batch_of(spec, options, BATCH, TOKENS, "meta")
    operators = Operators(BATCH, TOKENS)
    with cuda_kernels(PROFILE), operators:
        logits = model.logits(batch.ids, batch.tables, batch.positions)
        logits.backward(torch.empty_like(logits))
    return operators


def unexplained(case: str, spec: ModelSpec) -> dict[Key, int]:
    """Return the operators that occur more often on one side, but for those that differ on purpose."""
    rules = [rule for rule in DELIBERATE if spec.architecture in rule.families]
    apart = difference(real_operators(case), reference_operators(spec), dtypes=spec.architecture not in WIDER)
    return {key: count for key, count in apart.items() if not any(rule.covers(spec, key) for rule in rules)}


@pytest.mark.parametrize("case", OWN_CASES)
def test_operators_equal_those_of_transformers(case):
    assert not unexplained(case, spec_of(case))


@pytest.mark.parametrize("rule", DELIBERATE, ids=[rule.families[0] for rule in DELIBERATE])
def test_every_rule_is_needed(rule):
    for family in rule.families:
        spec, case = next((spec_of(case), case) for case in CASES if CASES[case][0] == family)
        apart = difference(real_operators(case), reference_operators(spec))
        assert any(rule.covers(spec, key) for key in apart), family


SCALED = ["llama", "gemma2", "falcon-grouped", "deepseek-v3", "gpt-oss", "phi3", "gpt2"]
SCALED += ["opt", "gpt-neo", "gptj", "granite-moe"]


@pytest.mark.parametrize("case", SCALED)
def test_a_multiplier_of_the_residual_stream_is_seen(case):
    """No rule hides a product of the residual stream, and its factor is compared as a number."""
    spec = spec_of(case)
    found = unexplained(case, replace(spec, embedding_scale=3.0))
    assert any(key[:2] == ("mul", stream(spec)) and key[3:] == (3.0,) for key in found)


WRONG = {
    "opt's scores": ("opt", lambda spec: attention_of(spec, scale=0.3)),
    "gpt-neo's scores": ("gpt-neo", lambda spec: attention_of(spec, scale=0.25)),
    "gpt-neo's norms": ("gpt-neo", lambda spec: with_layers(spec, placement="parallel")),
    "gptj's heads": ("gptj", lambda spec: attention_of(spec, rotary_dim=0)),
    "opt's bias": ("opt", lambda spec: feed_forward_of(spec, bias=False)),
    "granite's logits": ("granite", lambda spec: replace(spec, logit_scale=0.3)),
    "granite-moe's logits": ("granite-moe-factors", lambda spec: replace(spec, logit_scale=0.3)),
    "granite-moe's choice": ("granite-moe", lambda spec: feed_forward_of(spec, fp32_choice=False)),
}
"""Faults of families with a rule, in operators that the rule is about or that are near them."""


@pytest.mark.parametrize("wrong", WRONG)
def test_no_rule_hides_a_fault_of_its_family(wrong):
    case, changed = WRONG[wrong]
    assert unexplained(case, changed(spec_of(case)))


@pytest.mark.parametrize("family", WIDER)
def test_every_family_whose_dtypes_are_overlooked_has_some_apart(family):
    case = next(case for case in CASES if CASES[case][0] == family)
    one, other = real_operators(case), reference_operators(spec_of(case))
    assert len(difference(one, other)) > len(difference(one, other, dtypes=False))
