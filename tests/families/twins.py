"""Twins: memplan's reference model and transformers' own implementation, with the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from memplan.model.families import model_spec
from memplan.model.spec import Attention, LatentAttention, ModelSpec
from memplan.trace.reference.decoder import ReferenceModel
from memplan.trace.reference.parts import Tables
from memplan.trace.reference.run_options import ReferenceOptions

from .tiny import CASES

NEIGHBOURS = ("cohere", "cohere2", "glm", "glm4", "ernie4_5", "gptj")
"""Families that rotate neighbouring dimensions of a head."""

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BATCH, TOKENS = 3, 7

ONE_BASE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    # The lab builds both pairs of tables and rotates by the first: the base is no matter of memory.
    "gemma3_text": {"rope_parameters": {"full_attention": ONE_BASE, "sliding_attention": ONE_BASE}},
}
"""Keys of transformers' config that the lab leaves out on purpose."""


def real_config(architecture: str, config: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model(architecture, **(config | IDS | OVERRIDES.get(architecture, {})))


def real_model(architecture: str, config: dict[str, Any], attention: str = "eager", device: str = "cpu") -> Any:
    """Return transformers' model in fp32, in evaluation: no dropout."""
    real = real_config(architecture, config)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(real, attn_implementation=attention)
    return model.float().eval()


def spec_of(case: str) -> ModelSpec:
    architecture, config = CASES[case]
    return model_spec({"model_type": architecture} | config, case, case)


def reference_model(spec: ModelSpec, device: str = "cpu", target: Any = "cpu") -> ReferenceModel:
    options = ReferenceOptions(compute_dtype=torch.float32, target=target)
    return ReferenceModel(spec, options, device).eval()


# ------------------------------------------------------------------ weights
def randomise(model: nn.Module) -> None:
    """Fill parameters and the offsets of experts with numbers large enough for every operation to matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        tensors = dict(model.named_parameters())
        tensors |= {name: tensor for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias")}
        for tensor in tensors.values():
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))


def reordered(spec: ModelSpec, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of transformers with its rows in the reference model's order.

    Rows of a fused projection come by key-value head in GPT-NeoX and Falcon, and rotated dimensions in pairs
    in DeepSeek and :data:`NEIGHBOURS`; the lab has parts and halves. Which row is whose moves no byte.
    """
    part = spec.runs[0].layer.attention
    if isinstance(part, LatentAttention):
        return _halves(part, name, tensor)
    if spec.architecture in ("gpt_neox", "falcon", "gpt_bigcode") and f".{spec.names.qkv}." in name:
        return _parts(part, tensor)
    if spec.architecture in NEIGHBOURS and f".{spec.names.attention}." in name:
        heads = {spec.names.query: part.num_heads, spec.names.key: part.num_key_value_heads}.get(name.split(".")[-2])
        return (
            tensor
            if heads is None
            else _neighbours(tensor, heads, max(run.layer.attention.rotary_dim for run in spec.runs))
        )
    return tensor


def _neighbours(tensor: Tensor, heads: int, rotated: int) -> Tensor:
    whole = tensor.view(heads, -1, *tensor.shape[1:])
    turned = whole[:, :rotated]
    return torch.cat((turned[:, ::2], turned[:, 1::2], whole[:, rotated:]), 1).reshape(tensor.shape)


def _parts(part: Attention, tensor: Tensor) -> Tensor:
    each = part.num_heads // part.num_key_value_heads
    grouped = tensor.view(part.num_key_value_heads, each + 2, part.head_dim, *tensor.shape[1:])
    return torch.cat([piece.flatten(0, 2) for piece in grouped.split([each, 1, 1], 1)])


def _halves(part: LatentAttention, name: str, tensor: Tensor) -> Tensor:
    if ".q_proj." in name or ".q_b_proj." in name:
        heads, kept = part.num_heads, part.qk_nope_head_dim
    elif ".kv_a_proj_with_mqa." in name:
        heads, kept = 1, part.kv_lora_rank
    else:
        return tensor
    whole = tensor.view(heads, kept + part.qk_rope_head_dim, *tensor.shape[1:])
    turned = whole[:, kept:]
    return torch.cat((whole[:, :kept], turned[:, ::2], turned[:, 1::2]), 1).reshape(tensor.shape)


def copy_weights(spec: ModelSpec, real: nn.Module, reference: nn.Module) -> None:
    """Give the reference model the weights of transformers' model, by name."""
    own = dict(reference.named_parameters()) | dict(reference.named_buffers())
    with torch.no_grad():
        for name, tensor in (*real.named_parameters(), *real.named_buffers()):
            name = name if name in own else name.replace("mlp.e_score", "mlp.gate.e_score")  # where MiniMax has it
            if name in own:
                own[name].copy_(reordered(spec, name, tensor))


# ------------------------------------------------------------------ inputs
@contextmanager
def rotary_tables(real: nn.Module) -> Iterator[list[Any]]:
    """Yield a list that fills with what the rotary module of a model returns."""
    found: list[Any] = []
    modules = [module for name, module in real.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    hooks = [module.register_forward_hook(lambda *call: found.append(call[-1])) for module in modules[:1]]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def tables_of(found: list[Any], device: str = "cpu") -> Tables:
    """Return the tables of a model as the lab has them: both halves of the angles, without a batch."""
    mask = torch.ones((TOKENS, TOKENS), dtype=torch.bool, device=device).triu(1)
    if not found:
        return Tables(torch.empty(0, device=device), torch.empty(0, device=device), mask)
    pair = (found[0].real, found[0].imag) if isinstance(found[0], Tensor) else found[0]
    once = isinstance(found[0], Tensor) or not torch.equal(*pair[0][0].chunk(2, -1))
    if not isinstance(found[0], Tensor) and torch.equal(pair[0][..., ::2], pair[0][..., 1::2]):
        pair = pair[0][..., ::2], pair[1][..., ::2]
    cos, sin = (torch.cat((part[0], part[0]), -1) if once else part[0] for part in pair)
    return Tables(cos, sin, mask)


def looked_up(spec: ModelSpec) -> Tables:
    """Return the tables of a model whose layers look sines and cosines up in one of their own."""
    width = spec.runs[0].layer.attention.rotary_dim
    angles = torch.arange(TOKENS)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
    both = torch.cat((angles, angles), -1)
    return Tables(both.cos(), both.sin(), torch.ones((TOKENS, TOKENS), dtype=torch.bool).triu(1))


def tokens(spec: ModelSpec) -> Tensor:
    """Return tokens, none of them padding: transformers' embedding gives that no gradient."""
    return torch.randint(1, spec.vocab_size, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def outcome(model: nn.Module, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits, and the gradients of a fixed combination of them by name of the parameter."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    return logits.detach(), {name: tensor.grad for name, tensor in model.named_parameters()}
