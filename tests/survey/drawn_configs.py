"""Training configs for a survey: every key with every kind of value, drawn so that most of them are possible."""

from dataclasses import replace
from random import Random
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.update_classes import STACKED
from memplan.model.model import Model
from memplan.training.adapters import projections
from memplan.training.resolved import FLOAT_BYTES

Keys = dict[str, Any]

LENGTHS = (
    1,
    2,
    7,
    17,
    64,
    100,
    127,
    128,
    129,
    255,
    300,
    512,
    700,
    1000,
    1024,
    1537,
    2048,
    3071,
    3072,
    3073,
    4100,
    5003,
)
EAGER_LENGTHS = tuple(length for length in LENGTHS if length <= 1024)
"""Lengths for attention that keeps its scores: a matrix of them is as large as their square."""


BUNDLED = ("muon-", "adamw-bf16", "adamw-fp32", "adamw-int8")
"""How the names of optimizers begin that the bundled library steps by: these take codes, and states in host memory."""


def config_keys(rng: Random, model: Model, catalog: Catalog) -> Keys:
    """Return the keys of a training config for ``model``, as a file would give them."""
    adapted = rng.random() < 0.4
    keys: Keys = {"description": "drawn at random", **_weights(rng, catalog, adapted=adapted)}
    keys |= _adapter(rng, model) if adapted else {}
    keys |= _kernels(rng)
    keys |= _optimizer(rng, keys, catalog)
    keys |= _gradients(rng, keys)
    keys |= _sizes(rng, model, keys)
    for key, values, chance in (
        ("activation_checkpointing", ("full", "selective"), 0.6),
        ("clip_gradients", (True,), 0.15 if "gradients" not in keys else 0.0),
        ("dropout", (0.0, 0.1, 0.5), 0.4),
        ("evaluation", (True,), 0.2),
        ("evaluation_batch_size", (1, 2, 7), 0.1),
        ("save_checkpoint", (True,), 0.1),
        ("weight_average", ("fp32", "bf16"), 0.1),
        ("allocator", ("expandable",), 0.1),
        ("reserve", ("500 MiB",), 0.1),
        ("loss_scaling", (True,), 0.5 if keys["compute_dtype"] == "fp16" else 0.0),
    ):
        if rng.random() < chance:
            keys[key] = rng.choice(values)
    if keys.get("activation_checkpointing") == "full" and rng.random() < 0.3:
        keys["checkpointed_layers"] = {rng.choice(("every", "first")): rng.choice((1, 2, 3))}
    return keys | _small_parts(
        rng, keys, model, catalog
    )  # last, so that all else is as it was drawn before there were any


def _weights(rng: Random, catalog: Catalog, *, adapted: bool) -> Keys:
    """Return formats of the weights, and the dtype that products are computed in."""
    compute = rng.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))
    kind = rng.random()
    if kind < 0.45:
        return {"compute_dtype": compute, "weights": {"default": compute}}
    if kind < 0.6:
        return {"compute_dtype": rng.choice(("bf16", "fp16")), "weights": {"default": "fp32"}}
    stored = {
        name: entry for name, entry in catalog.formats.entries.items() if entry.storable and name not in FLOAT_BYTES
    }
    frozen = [name for name, entry in stored.items() if entry.product == "decoded" and not entry.decoding_temporaries]
    trained = [name for name in frozen if catalog.formats[name].codec is not None]
    codes = sorted(frozen if adapted else trained)
    hidden = rng.choice(codes)
    weights = {"default": compute, "hidden_matrix": hidden}
    if rng.random() < 0.4:
        weights["embedding"] = rng.choice(codes)
    if rng.random() < 0.2:
        weights["head"] = rng.choice((compute, rng.choice(codes)))
    if rng.random() < 0.2:
        weights["expert_matrix"] = rng.choice((compute, rng.choice(codes)))
    if rng.random() < 0.3:
        weights["norm"] = "fp32"
    return {"compute_dtype": compute, "weights": weights}


def _small_parts(rng: Random, keys: Keys, model: Model, catalog: Catalog) -> Keys:
    """Return formats and optimizers with those of routers and biases, where a model has any, and whether experts are balanced."""
    present = {tensor.role for tensor in model.inventory}
    roles = [role for role in ("router", "bias") if role in present]
    floats = (keys["compute_dtype"], "fp32")
    drawn = {"weights": {**keys["weights"], **{role: rng.choice(floats) for role in roles if rng.random() < 0.3}}}
    if "optimizer" in keys:
        bundled = _trains_codes(keys) or "offload" in keys or "dtype" in keys.get("gradients", {})
        names = sorted(name for name, entry in catalog.optimizers.entries.items() if entry.takes == "all")
        able = [name for name in names if name != "rmsprop" and (name.startswith(BUNDLED) or not bundled)]
        drawn["optimizer"] = {**keys["optimizer"], **{role: rng.choice(able) for role in roles if rng.random() < 0.2}}
    if "router" in roles and rng.random() < 0.1:
        drawn["method"] = {"balances": rng.choice((False, False, True))}
    return drawn


def _adapter(rng: Random, model: Model) -> Keys:
    """Return adapters on all projections, or on some of them."""
    known = projections(replace(model, inventory=tuple(tensor for tensor in model.inventory if tensor.used)))
    some = sorted(rng.sample(known, rng.randint(1, len(known))))
    adapter: Keys = {"kind": rng.choice(("lora", "lora", "dora")), "rank": rng.choice((1, 3, 8, 16, 64))}
    if rng.random() < 0.5:
        adapter["targets"] = some
    if rng.random() < 0.5:
        adapter["dtype"] = rng.choice(("bf16", "fp32", "fp16"))
    if rng.random() < 0.3:
        adapter["dropout"] = rng.choice((0.0, 0.05))
    return {"adapter": adapter}


def _kernels(rng: Random) -> Keys:
    """Return choices of kernels, each left out as often as not."""
    choices: dict[str, tuple[Any, ...]] = {
        "attention": ("flash", "math", "efficient", "cudnn", "auto"),
        "norm": ("composite",),
        "rotary": ("fused",),
        "activation": ("fused",),
        "optimizer": ("fused", "for-loop"),
        "newton_schulz": ("fast", "torch"),
        "loss": ("fp32", "chunked"),
        "loss_chunks": (1, 2, 5),
    }
    drawn = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.35}
    return {"kernels": drawn} if drawn else {}


def _optimizer(rng: Random, keys: Keys, catalog: Catalog) -> Keys:
    """Return an optimizer, or two: any of the catalog, of those that step codes where codes are trained."""
    coded = _trains_codes(keys)
    entries = catalog.optimizers.entries.items()
    own = sorted(name for name, entry in entries if entry.implementation != STACKED)  # but for nanochat's
    names = [name for name in own if not coded or name.startswith(BUNDLED)]
    if rng.random() < 0.3:
        return {}
    optimizer = {"default": rng.choice(names)}
    for role in ("hidden_matrix", "hidden_matrix", "expert_matrix", "embedding", "norm", "head"):
        able = names if role.endswith("matrix") else [n for n in names if catalog.optimizers[n].takes == "all"]
        if rng.random() < 0.1:
            optimizer[role] = rng.choice(able)
    kernels = keys.get("kernels", {})
    if "rmsprop" in optimizer.values():
        kernels.pop("optimizer", None)  # whose scratch is known for foreach alone
    if kernels.get("newton_schulz") != "torch" and rng.random() < 0.2:
        keys["kernels"] = {**kernels, "muon_batch_bytes": rng.choice((1, 10**6, 10**9))}
    if keys.get("kernels", {}).get("newton_schulz") == "torch" and (coded or _other_momentum(optimizer, keys)):
        del keys["kernels"]["newton_schulz"]
    drawn: Keys = {"optimizer": optimizer}
    if "adapter" not in keys and not coded and rng.random() < 0.2:
        return {**drawn, "master_weights": rng.choice(("fp32", "bf16"))}
    torch_muon = keys.get("kernels", {}).get("newton_schulz") == "torch"
    if rng.random() < 0.2 and not torch_muon and all(name.startswith(BUNDLED) for name in optimizer.values()):
        drawn["offload"] = {"optimizer_states": "cpu"}
    return drawn


def _trains_codes(keys: Keys) -> bool:
    return "adapter" not in keys and keys["weights"].get("hidden_matrix", "fp32") not in FLOAT_BYTES


def _other_momentum(optimizer: Keys, keys: Keys) -> bool:
    """Tell whether a momentum has another dtype than its gradient, which torch's own Muon does not keep."""
    own = keys["adapter"].get("dtype", "bf16") if "adapter" in keys else keys["weights"]["default"]
    return any(name.startswith("muon-") and name != f"muon-{own}" for name in optimizer.values())


def _gradients(rng: Random, keys: Keys) -> Keys:
    """Return how gradients are kept: in another dtype where their optimizer stores them, for how long, how often."""
    gradients: Keys = {}
    half = keys["compute_dtype"] == "fp16"  # gradients that are not stored beside codes, and not in bf16 beside fp16
    must = half and _trains_codes(keys)
    if must or (rng.random() < 0.35 and all(name.startswith(BUNDLED) for name in keys.get("optimizer", {}).values())):
        dtypes = ("fp32", "fp8-e4m3", "fp8-e5m2", *(() if half else ("bf16",)))
        gradients["dtype"] = rng.choice(dtypes)
    if rng.random() < 0.25:
        gradients["lifetime"] = "layer"
        return {"gradients": gradients}
    drawn: Keys = {"gradients": gradients} if gradients else {}
    if rng.random() < 0.3:
        drawn["gradient_accumulation_steps"] = rng.choice((2, 3, 8))
    if rng.random() < 0.15:
        drawn["zero_gradients"] = "fill"
    return drawn


def _sizes(rng: Random, model: Model, keys: Keys) -> Keys:
    """Return micro-batch size and sequence length."""
    math = keys.get("kernels", {}).get("attention") == "math"
    limit = model.spec.learned_positions or max(LENGTHS)
    lengths = [n for n in (EAGER_LENGTHS if math else LENGTHS) if n <= limit]
    return {"micro_batch_size": rng.choice((1, 1, 2, 3, 5, 9)), "sequence_length": rng.choice(lengths)}
