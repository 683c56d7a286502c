"""Models small enough to trace and to train, the shipped catalog, loaded once, and how files and answers are read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from memplan.catalog.catalog import Catalog
from memplan.library.lookup import open_catalog
from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention, Layer, LayerRun, MixtureOfExperts, Mlp, ModelSpec, Norm


def shipped_catalog() -> Catalog:
    """Return the catalog that the library opens, so that what it has read is read once."""
    return open_catalog(None)


def yaml_data(path: Path) -> Any:
    """What a file says, read in C where that is there: ``safe_load`` takes ten times as long, in every worker."""
    return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def follow_schema(value: Any, schema: Any) -> None:
    """Hold a value against a JSON Schema, of which tests/report/test_schemas.py tells that it is one."""
    import jsonschema

    jsonschema.Draft202012Validator(schema).validate(value)


def llama(vocab: int, hidden: int, layers: int, heads: int, groups: int, inner: int, width: int) -> Model:
    """A Llama by its shapes, untied."""
    layer = Layer(Attention(heads, groups, width, width), Mlp(inner), Norm())
    spec = ModelSpec("llama", "llama", vocab, hidden, (LayerRun(layer, layers),), Norm())
    return Model.from_spec(spec, "test")


SHAPES = {
    "cpu": llama(16000, 256, 2, 8, 4, 768, 32),
    "tiny": llama(1000, 64, 2, 4, 2, 96, 16),
    "small": llama(32000, 512, 8, 8, 4, 1536, 64),
    "1b": llama(128256, 2048, 16, 32, 8, 8192, 64),
    "8b": llama(128256, 4096, 32, 32, 8, 14336, 128),
    "405b": llama(128256, 16384, 126, 128, 8, 53248, 128),
}


def _shrunk_attention(part: Attention | LatentAttention) -> Attention | LatentAttention:
    if isinstance(part, LatentAttention):
        rank = 64 if part.q_lora_rank else 0
        return replace(
            part,
            num_heads=4,
            q_lora_rank=rank,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        )
    groups = max(1, 8 * part.num_key_value_heads // part.num_heads)
    return replace(part, num_heads=8, num_key_value_heads=groups, head_dim=32, rotary_dim=32 if part.rotary_dim else 0)


def few_experts(part: MixtureOfExperts) -> dict[str, int]:
    """Eight experts, in two groups where there are groups."""
    used = min(2, part.experts_per_token)
    return {"num_experts": 8, "experts_per_token": used, "groups": min(2, part.groups), "groups_per_token": 1}


def shrunk_layer(layer: Layer) -> Layer:
    part = layer.feed_forward
    if isinstance(part, MixtureOfExperts):
        part = replace(part, intermediate_size=128, **few_experts(part))
        part = replace(part, shared_intermediate_size=128 if part.shared_intermediate_size else 0)
    else:
        part = replace(part, intermediate_size=768)
    return replace(layer, attention=_shrunk_attention(layer.attention), feed_forward=part)


def shrunk_model(model: Model) -> Model:
    """The same family with two layers of width 256, so that it can really be trained here."""
    runs = tuple(LayerRun(shrunk_layer(run.layer), 2, 2 * i) for i, run in enumerate(model.spec.runs[:2]))
    positions = min(model.spec.learned_positions, 512)
    spec = replace(model.spec, vocab_size=16000, hidden_size=256, runs=runs, learned_positions=positions)
    return Model.from_spec(spec, "test")
