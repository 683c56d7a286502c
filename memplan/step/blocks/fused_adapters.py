"""Projections with adapters as one function of autograd: query, key and value together, a whole gated part, or one alone.

Each product with a base weight is followed by its adapter's, which is added in place; the function saves its input and
16-bit copies of the adapters, and its backward forms all their gradients before it decodes base weights one by one. unsloth's
saves no copies, casts adapters again for backward, and writes the gradient of what several projections read over that.

Source:
    ``matmul_lora``, ``LoRA_QKV``, ``LoRA_MLP`` and ``LoRA_O`` in axolotl/kernels/lora.py, ``dequantize`` in quantize.py
    (0.21.0), which follow ``LoRA_QKV``, ``LoRA_MLP`` and ``LoRA_W`` in unsloth/kernels/fast_lora.py (2026.10.9).
"""

from collections.abc import Sequence
from dataclasses import replace

from memplan.catalog.kernel_profiles import ADAPTED
from memplan.model.model import Model
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, OVER, Sizes, Traits, Value, Weight
from memplan.training.adapters import adapter_tensors
from memplan.training.resolved import TrainingSetup

PARTS = ("lora_A", "lora_B")

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj", "down_proj"))
"""Names of projections that run as one function where each of them has an adapter."""


def run_together(name: str) -> list[str]:
    """Return the names of the projections that one function has together with this one; itself alone where it has none."""
    part, _, own = name.rpartition(".")
    return [f"{part}.{other}" for names in TOGETHER if own in names for other in names] or [name]


def decoded_weight_bytes(model: Model, setup: TrainingSetup) -> int:
    """Return the weights that functions were given decoded, and keep from forward to the end of backward; 0 where they are given codes.

    Source:
        ``get_lora_parameters`` and ``ctx.weights`` in axolotl/kernels/lora.py (0.21.0).
    """
    if not setup.config.parallel.staged_codes:
        return 0
    adapted = {tensor.name.partition(".lora_A.")[0] for tensor in adapter_tensors(model, setup)}
    fused = {
        name
        for part, names in zip(ADAPTED, TOGETHER, strict=True)
        if part in setup.profile.fused_adapters
        for name in names
    }
    return sum(
        tensor.elements * tensor.count * setup.compute_bytes
        for tensor in model.inventory
        if (name := tensor.name.removesuffix(".weight")).rpartition(".")[2] in fused
        and adapted.issuperset(run_together(name))
    )


def fuses(builder: Builder, part: str, names: Sequence[str]) -> bool:
    """Tell whether the projections of these names, which are ``qkv``, ``o`` or ``mlp``, run as one function: where each has an adapter.

    Those that overwrite their input have no bias.
    """
    if part not in builder.profile.fused_adapters:
        return False
    if builder.settings.projections.fused_overwrites and any(f"{name}.bias" in builder.weights for name in names):
        return False
    return all(f"{name}.lora_A.weight" in builder.weights for name in names)


def fused_linears(builder: Builder, x: Value, sizes: Sequence[tuple[str, int]]) -> list[Value]:
    """Return several projections of ``x``.

    Args:
        x: What all of them are given.
        sizes: Name and width of each.
    """
    tape, names = builder.tape, [name for name, _ in sizes]
    read = _read(builder, names)
    with tape.alive(x, *read):
        dropped = builder.dropped(x, builder.settings.adapter_dropout)
        outs: list[Value] = []
        for name, rows in sizes:
            with tape.alive(dropped, *outs):
                outs.append(_product(builder, x, dropped, name, rows))
        with tape.alive(dropped, *outs):
            saves = [x, dropped, *_saved_copies(builder, names)]
        workspace = [(x.quantity, _gradient_ranks(builder, names)), *_decoded(builder, names)]
        _function(
            builder,
            f"adapted {' '.join(n.rsplit('.', 1)[-1] for n in names)}",
            (x, dropped),
            outs,
            saves,
            (names, read),
            workspace,
        )
        return outs


def fused_mlp(builder: Builder, x: Value, prefix: str, inner: int) -> Value:
    """Return what a gated feed-forward part adds to the residual stream; backward overwrites what it saved of the gate."""
    tape, settings = builder.tape, builder.settings
    gate_name, up_name, down_name = mlp_names(builder, prefix)
    names = (gate_name, up_name, down_name)
    read = _read(builder, names)
    with tape.alive(x, *read):
        dropped = builder.dropped(x, settings.adapter_dropout)
        with tape.alive(dropped):
            gate = _product(builder, x, dropped, gate_name, inner)
            with tape.alive(gate):
                up = _product(builder, x, dropped, up_name, inner)
                with tape.alive(up):
                    hidden = tape.make("gated activation", builder.fresh(up), gate, up)
                    with tape.alive(hidden):
                        out = _product(builder, hidden, hidden, down_name, settings.hidden_size)
                        with tape.alive(out):
                            saves = [x, dropped, gate, up, *_saved_copies(builder, names)]
        # The gradient of the product, which the activation's backward works in.
        ranks = names[:2] if settings.projections.fused_overwrites else names
        workspace = [(x.quantity, up.coefficient + _gradient_ranks(builder, ranks)), *_decoded(builder, names)]
        _function(builder, "adapted feed-forward part", (x, dropped), [out], saves, (names, read), workspace)
        return out


def mlp_names(builder: Builder, prefix: str) -> tuple[str, str, str]:
    """Return the names of a gated part's projections."""
    names = builder.settings.names
    return f"{prefix}.{names.gate}", f"{prefix}.{names.up}", f"{prefix}.{names.down}"


def _read(builder: Builder, names: Sequence[str]) -> list[Value]:
    """Return weights that are decoded as a function is given them, and stay as attributes of its node; none of other codes."""
    read: list[Value] = []
    for weight in [builder.weight(f"{name}.weight") for name in names]:
        if weight.parametrised:
            with builder.tape.alive(*read):
                scratch = [(ONE, size) for size in weight.decoding_sizes if size]
                read.append(builder.tape.make("decode", builder.constant(weight.copy_bytes, 1), scratch=scratch))
    return read


def _product(builder: Builder, x: Value, dropped: Value, name: str, rows: int) -> Value:
    """Return a projection, to which the adapter's part is added in place."""
    tape, weight = builder.tape, builder.weight(f"{name}.weight")
    decoded: list[Value] = []
    if weight.coded and not builder.settings.projections.fused_overwrites:  # else into a buffer that stays
        scratch = [(ONE, weight.scales_bytes)] if weight.scales_bytes else []
        decoded = [tape.make("decode", builder.constant(weight.copy_bytes, 1), scratch=scratch)]
    out = tape.make(f"linear {name}", tape.value(x.quantity, rows, builder.compute), x, *decoded, product=True)
    copies = _copies(builder, (name,))
    down = builder.weight(f"{name}.lora_A.weight")
    low = tape.value(x.quantity, down.rows, builder.compute)
    tape.make(f"linear {name}.lora_A", low, dropped, *copies, out, product=True)
    return out


def _saved_copies(builder: Builder, names: Sequence[str]) -> list[Value]:
    """Return copies of adapters that backward is left; none where it makes its own."""
    return [] if builder.settings.projections.fused_overwrites else _copies(builder, names)


def _copies(builder: Builder, names: Sequence[str]) -> list[Value]:
    """Return copies of adapters in the dtype of products; none where they have it."""
    weights = [builder.weight(f"{name}.{part}.weight") for name in names for part in PARTS]
    wide = [weight for weight in weights if weight.element_bytes != builder.compute or weight.foreign]
    copies: list[Value] = []
    for weight in wide:
        with builder.tape.alive(*copies):
            copies.append(
                builder.tape.make("cast adapter", builder.constant(weight.rows * weight.columns, builder.compute))
            )
    return copies


def _gradient_ranks(builder: Builder, names: Sequence[str]) -> int:
    """Return the bytes, for each token, of gradients multiplied by ``lora_B``, which backward has names for.

    Where no weight is decoded, the fullest moment is that of an input multiplied by ``lora_A``.
    """
    rows = [builder.weight(f"{name}.lora_A.weight").rows for name in names]
    plain = builder.settings.projections.fused_overwrites and not builder.weight(f"{names[0]}.weight").coded
    return (sum(rows) + (rows[0] if plain else 0)) * builder.compute


def _decoded(builder: Builder, names: Sequence[str]) -> Sizes:
    """Return what the largest base weight takes while backward multiplies by it, floats being read as they are; and casts of adapters."""
    weights = [builder.weight(f"{name}.weight") for name in names]
    scales = not builder.settings.projections.fused_overwrites  # a kernel of its own forms none
    largest = max((w.copy_bytes + w.scales_bytes * scales if w.coded else 0) for w in weights)
    adapters = [builder.weight(f"{name}.{part}.weight") for name in names for part in PARTS]
    wide = [w for w in adapters if w.element_bytes != builder.compute or w.foreign]
    again = wide if builder.settings.projections.fused_overwrites else []
    return [(ONE, largest + sum(w.rows * w.columns * builder.compute for w in again))]


def _function(
    builder: Builder,
    title: str,
    given: tuple[Value, Value],
    outs: Sequence[Value],
    saves: Sequence[Value],
    read: tuple[Sequence[str], Sequence[Value]],
    workspace: Sizes,
) -> None:
    """Record the function: gradients of its inputs and of all adapters are there when base weights are decoded.

    Args:
        given: Its input, and that as adapters are given it.
        read: Names of its projections, and weights that were decoded for it.
    """
    (x, dropped), (names, weights) = given, read
    over = builder.settings.projections.fused_overwrites and len(names) > 1
    reads = [(x, OVER if over else NEW), *([(dropped, NEW)] if dropped is not x else [])]
    adapters = [_narrow(builder, builder.weight(f"{name}.{part}.weight")) for name in names for part in PARTS]
    traits = Traits(packs=True, workspace=workspace, custom=True, attributes=tuple(weights))
    builder.tape.apply(title, reads, outs, list(dict.fromkeys(saves)), adapters, traits)


def _narrow(builder: Builder, weight: Weight) -> Weight:
    """Return an adapter's matrix, whose gradient may be formed in the dtype of products and cast when all are formed."""
    if builder.settings.projections.fused_gradients == "adapter":
        return weight
    size = weight.rows * weight.columns * builder.compute
    return weight if size == weight.own_bytes else replace(weight, formed_bytes=size, copy_bytes=size, copy_saved=True)


def folding_factors(builder: Builder, name: str, weight: Weight) -> list[Value]:
    """Record what a parameter's adapter is read as, in the weight's dtype, and a sum with its product that is checked and let go.

    Returns:
        The factors where they are cast: the module has names for them until it returns.

    Source:
        ``ParamWrapper`` and ``_LoraFactorsProxy`` in peft/tuners/lora/layer.py (0.21.2), lines 2305 to 2601; ``ParametrizationList``
        in torch/nn/utils/parametrize.py (v2.13.0), which calls itself as it is made.
    """
    tape, copies = builder.tape, list[Value]()
    for factor in (builder.weight(f"{name}.{part}.weight") for part in PARTS):
        if factor.element_bytes != weight.element_bytes:
            with tape.alive(*copies):
                size = factor.rows * factor.columns * weight.element_bytes
                copies.append(tape.make("cast adapter", builder.constant(size, 1)))
    with tape.alive(*copies):
        tape.make(f"fold {name}", builder.constant(weight.own_bytes, 1))
    return copies


def folded_weight(builder: Builder, name: str, weight: Weight, copies: Sequence[Value]) -> Value:
    """Record the sum of a weight and its adapter's product; backward saves the factors."""
    factors = [builder.weight(f"{name}.{part}.weight") for part in PARTS]
    folded = builder.tape.value(ONE, weight.own_bytes, 1, part=Part.ACTIVATIONS)
    return builder.tape.apply(f"fold {name}", [], folded, copies, factors, Traits(custom=True))
