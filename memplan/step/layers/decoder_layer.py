"""A whole layer on a tape: attention and a feed-forward part, joined as the placement of its norms says."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from memplan.model.gated_delta_net import PREFIX, GatedDeltaNet
from memplan.model.parameter_tensors import norm_names, norm_of
from memplan.model.short_convolution import ShortConvolution
from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts
from memplan.model.state_space import StateSpace
from memplan.step.blocks.block_settings import BlockSettings
from memplan.step.blocks.builder import Builder
from memplan.step.blocks.norms import joined, normalised
from memplan.step.divided.shared_ends_and_rows import whole_rows
from memplan.step.feed_forwards.feed_forward import mlp
from memplan.step.kernels.attention_choice import is_wide
from memplan.step.layers.attention import attention
from memplan.step.layers.handed_down import NOTHING_HANDED, Handed, receive, with_own_input
from memplan.step.layers.scaled_dot_product import latent_attention
from memplan.step.layers.stepwise_attention import window_masks
from memplan.step.playing.section import Section
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value, Weight


class Staged(NamedTuple):
    """How a layer's input waits in host memory."""

    is_view: bool  # Whether backward, and forward, have a view of a buffer for it
    hooked: bool = False  # Whether autograd's hooks copy it
    behind: Sizes | None = None  # What these keep of the part behind; None for a layer that is like this one


MOST_LAYERS = 128
"""Kinds of layers that are remembered: a search plans some dozens of them, each hundreds of times."""


@lru_cache(maxsize=MOST_LAYERS)
def layer_section(
    settings: BlockSettings,
    layer: Layer,
    weights: tuple[tuple[str, Weight], ...],
    needs_gradient: bool,
    element_bytes: int,
    leaf: bool = False,
    *,
    staged: Staged | None = None,
    handed: Handed = NOTHING_HANDED,
) -> Section:
    """Return a layer on tape, the same one each time.

    Args:
        layer: Its shape.
        weights: Its parameters, by name relative to it.
        needs_gradient: Whether its input needs a gradient.
        element_bytes: Bytes of an element of its input.
        leaf: Whether its input is a leaf of autograd's graph.
        staged: How its input waits in host memory, if it does.
        handed: What it is given besides.
    """
    if settings.wide_attention and is_wide(layer.attention):
        settings = replace(settings, profile=replace(settings.profile, attention=settings.wide_attention))
    builder = Builder(settings, dict(weights))
    builder.tape.instant, builder.tape.waits = "layer", staged is not None
    given = builder.tape.part_of if staged is not None and staged.is_view else builder.tape.given
    entry = given(settings.stream, settings.hidden_size, element_bytes, needs_gradient)
    entry.leaf = leaf
    builder.tape.stays(*([entry] if settings.names_hidden else []))
    output = layer_output(builder, entry, layer, receive(builder, handed, layer))
    builder.tape.touch(*builder.named_values)
    builder.tape.region_stays = staged is not None and not staged.is_view and not staged.hooked
    if staged is not None and staged.hooked:
        builder.tape.lingers = staged.behind
        if staged.behind is None:  # a layer like this one, which is given what this one gives
            width = output.element_bytes if settings.code.promotes else settings.residual_bytes
            alike = needs_gradient and element_bytes == width
            after = None if alike else layer_section(settings, layer, weights, True, width, staged=staged)
            behind, above = (builder.tape, entry) if after is None else (after.tape, after.entry)
            unsaved = above.storage not in behind.saved_storages()
            builder.tape.lingers = ((above.quantity, above.coefficient),) if unsaved else ()
    return Section(builder.tape, entry, output)


def layer_output(builder: Builder, x: Value, layer: Layer, own: Value | None = None) -> Value:
    """Return the residual stream after a layer, which may be given an embedding of its ``own``."""
    code, normed = builder.settings.code, _norms(builder, layer)
    if code.window_masks and isinstance(layer.attention, Attention) and layer.attention.windowed:
        builder.named_values += window_masks(builder)

    def added(x: Value, part: Value) -> Value:
        total = builder.add(x, builder.pointwise("scale", part) if layer.residual_scale else part)
        if code.promotes:
            builder.tape.touch(part)  # its name is given to the sum, and not that of a function which returns it scaled
        return total

    if layer.beside is not None:
        return _beside(builder, x, layer, layer.beside)
    if layer.placement == "alone":
        return _alone(builder, x, layer)
    if code.names_all:
        return _renaming(builder, x, layer)
    if code.adds_inside:
        return _added_inside(builder, x, layer)
    if layer.placement == "parallel":
        return (_own_parallel if code.sums == "own" else _parallel)(builder, x, layer)
    if layer.placement in ("post", "summed"):
        x = joined(builder, x, attention_part(builder, x, layer), layer, 0)
        with builder.tape.alive(x):
            return joined(builder, x, feed_forward(builder, x, layer), layer, 1)
    if code.names_parts:
        return (_named_sandwich if layer.placement == "sandwich" else _named_parts)(builder, x, layer)
    if layer.placement == "sandwich":
        return _sandwich(builder, x, layer, own)
    first = normed(x, 0)
    builder.named_values += [first] if code.names_norm else []
    with builder.tape.alive(*((first,) if code.names_fed else ())):
        part = builder.dropped_behind(attention_part(builder, first, layer))
        builder.named_values += [part] if code.names_attention else []
        x = added(x, part)
    with builder.tape.alive(x):
        second = normed(x, 1)
        with builder.tape.alive(*((second,) if code.names_fed else ())):
            return added(x, builder.dropped(feed_forward(builder, second, layer)))


def _sandwich(builder: Builder, x: Value, layer: Layer, own: Value | None) -> Value:
    """Return the residual stream after a layer with norms before and after each part."""
    code, normed = builder.settings.code, _norms(builder, layer)
    x = builder.add(x, builder.dropped(normed(attention_part(builder, normed(x, 0), layer), 1)))
    with builder.tape.alive(x):
        fed = feed_forward(builder, normed(x, 2), layer)
        if layer.experts is not None:
            from memplan.step.feed_forwards.experts_beside import with_experts

            fed = with_experts(builder, x, fed, layer, layer.experts)
        out = builder.add(x, builder.dropped(normed(fed, 3)))
    out = out if own is None else with_own_input(builder, out, own, layer)
    if code.scales_output:
        traits = Traits(packs=True)  # the number is a tensor, which hooks of checkpointing are given
        out = builder.tape.apply("scale in place", [(out, NEW)], builder.tape.view(out), traits=traits)
    return out


def _beside(builder: Builder, x: Value, layer: Layer, beside: StateSpace) -> Value:
    """Return the residual stream after a layer with a state space part beside attention, with names of what each of both adds."""
    # Source: ``FalconH1DecoderLayer.forward`` in transformers/models/falcon_h1/modeling_falcon_h1.py (5.23.0).
    from memplan.step.delta.state_space_layer import state_space

    tape, normed = builder.tape, _norms(builder, layer)
    first = normed(x, 0)
    with tape.alive(first):
        scanned = builder.pointwise("scale", state_space(builder, first, beside))
        with tape.alive(scanned):
            attended = builder.pointwise("scale", attention_part(builder, builder.pointwise("scale", first), layer))
        with tape.alive(scanned, attended):
            total = builder.add(scanned, attended)
    x = builder.add(x, total)
    with tape.alive(scanned, attended), tape.alive(x):
        return builder.add(x, feed_forward(builder, normed(x, 1), layer))


def _alone(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return the residual stream after a layer of one part."""
    # Source: ``NemotronHBlock.forward`` in transformers/models/nemotron_h/modeling_nemotron_h.py (5.24.0).
    weight = builder.weight(f"{builder.settings.names.input_norm}.weight")
    normed = _norms(builder, layer)(builder.cast(x, weight.element_bytes, foreign=weight.foreign), 0)
    return builder.add(x, (attention_part if layer.feed_forward is None else feed_forward)(builder, normed, layer))


def _added_inside(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return the same where either part adds what it is given beside its input, with the names of all that it has formed."""
    # Source: ``BloomBlock.forward``, ``BloomAttention.forward`` and ``BloomMLP.forward`` in
    # transformers/models/bloom/modeling_bloom.py (5.23.0).
    tape, normed = builder.tape, _norms(builder, layer)

    def added(x: Value, part: Value) -> Value:
        with tape.alive(part):
            total = builder.add(x, builder.dropped(part))
        tape.touch(*builder.named)
        builder.named.clear()
        return total

    first = normed(x, 0)
    with tape.alive(first):
        x = added(x, attention_part(builder, first, layer))
        with tape.alive(x):
            second = normed(x, 1)
    with tape.alive(x, second):
        return added(x, feed_forward(builder, second, layer))


def _norms(builder: Builder, layer: Layer) -> Callable[[Value, int], Value]:
    """Return what applies a layer's norm of a number to a value."""
    names, hidden = norm_names(builder.settings.names, layer), builder.settings.hidden_size
    return lambda value, index: normalised(builder, value, norm_of(layer, index), names[index], hidden)


def _named_sandwich(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return the residual stream after a layer with norms around both parts, each part with a name until the layer's end."""
    normed = _norms(builder, layer)
    first = normed(x, 0)
    with builder.tape.alive(first):
        part = attention_part(builder, first, layer)
        with builder.tape.alive(part):
            x = builder.add(normed(part, 1), x)
    with builder.tape.alive(part, x):
        fed = feed_forward(builder, normed(x, 2), layer)
        with builder.tape.alive(fed):
            return builder.add(x, normed(fed, 3))


def _named_parts(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return the residual stream after a layer with a norm before each part, likewise."""
    normed = _norms(builder, layer)
    first = normed(x, 0)
    with builder.tape.alive(first):  # its name is given to the sum
        part = attention_part(builder, first, layer)
        x = builder.add(part, x)
    with builder.tape.alive(part), builder.tape.alive(x):
        part = feed_forward(builder, normed(x, 1), layer)
        with builder.tape.alive(part):
            return builder.add(x, part)


def _renaming(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return the residual stream after a layer that has one name for all that norms return, and one for attention's part."""
    # Source: ``Block.forward`` in litgpt/model.py (0.5.13), lines 362 to 387.
    tape, hidden, before = builder.tape, builder.settings.hidden_size, layer.placement != "post"
    names = iter(norm_names(builder.settings.names, layer))

    def normed(value: Value) -> Value:
        with tape.alive(value):
            return normalised(builder, value, layer.norm, next(names), hidden)

    after, alone = layer.placement in ("post", "sandwich"), len(norm_names(builder.settings.names, layer)) == 1
    named = normed(x) if before else x
    parts_first = builder.settings.code.sums == "parts-first"
    builder.named_values += [named] if parts_first and layer.placement != "parallel" else []
    with tape.alive(named):
        part = attention_part(builder, named, layer)
        part = normed(part) if after else part
        builder.named_values.append(part)
        if layer.placement != "parallel":
            total = builder.add(part, x)
            with tape.alive(total):
                named = normed(total) if before else total
        elif not alone:
            named = normed(x)
    if layer.placement == "parallel":
        with tape.alive(named):
            if parts_first:
                return builder.add(builder.add(feed_forward(builder, named, layer), part), x)
            total = builder.add(part, x)
    with tape.alive(total, *(() if parts_first else (named,))):
        with tape.alive(named):
            fed = feed_forward(builder, named, layer)
        return builder.add(normed(fed) if after else fed, total)


def _own_parallel(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return the residual stream after attention and a feed-forward part beside it, as the bundled models add them up."""
    names, hidden = norm_names(builder.settings.names, layer), builder.settings.hidden_size
    first = normalised(builder, x, layer.norm, names[0], hidden)
    with builder.tape.alive(first):
        second = normalised(builder, x, layer.norm, names[1], hidden) if len(names) > 1 else first
        with builder.tape.alive(second):
            attended = builder.add(x, builder.dropped(attention_part(builder, first, layer)))
            with builder.tape.alive(attended):
                return builder.add(attended, builder.dropped(feed_forward(builder, second, layer)))


def _parallel(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return the residual stream after attention and a feed-forward part beside it, as transformers' families add them up."""
    tape, code, hidden = builder.tape, builder.settings.code, builder.settings.hidden_size
    names = norm_names(builder.settings.names, layer)

    def normed(index: int) -> Value:
        return normalised(builder, x, layer.norm, names[index], hidden)

    first = normed(0)
    with tape.alive(*(() if code.sums == "late" else (first,))):
        second = first if len(names) == 1 else None if code.sums == "late" else normed(1)
        with tape.alive(*(() if second is None else (second,))):
            attended = builder.dropped_behind(attention_part(builder, first, layer))
        with tape.alive(attended):
            second = second or normed(1)
            with tape.alive(*(() if code.sums == "late" else (second,))):
                fed = builder.dropped(feed_forward(builder, second, layer))
                with tape.alive(fed):
                    if code.sums == "residual-first":
                        return builder.add(builder.add(x, attended), fed)
                    return builder.add(x, _both(builder, fed, attended))


def _both(builder: Builder, fed: Value, attended: Value) -> Value:
    """Return the sum of what feed-forward part and attention add, which may be formed in place of the first."""
    if builder.settings.code.sums != "in-place":
        return builder.add(fed, attended)
    ways = [(fed, SAME), (attended, SAME)]
    return builder.tape.apply("add", ways, builder.tape.view(fed), traits=SAVES_NOTHING)


def attention_part(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return a layer's attention."""
    with builder.tape.alive(*((x,) if builder.settings.divided else ())):
        return _attention(builder, whole_rows(builder, x), layer)


def _attention(builder: Builder, x: Value, layer: Layer) -> Value:
    if isinstance(layer.attention, LatentAttention):
        return latent_attention(builder, x, layer.attention, builder.settings.names.attention)
    if isinstance(layer.attention, Attention):
        return attention(builder, x, layer.attention, builder.settings.names.attention)
    assert layer.attention is not None
    return _recurrent(builder, x, layer.attention)


def _recurrent(builder: Builder, x: Value, part: GatedDeltaNet | ShortConvolution | StateSpace) -> Value:
    """Return what takes the place of attention in few models, whose code is imported for them alone."""
    from memplan.step.delta.delta_layer import gated_delta_net
    from memplan.step.delta.gated_convolution import gated_convolution
    from memplan.step.delta.state_space_layer import state_space

    if isinstance(part, GatedDeltaNet):
        return gated_delta_net(builder, x, part, PREFIX)
    return gated_convolution(builder, x, part) if isinstance(part, ShortConvolution) else state_space(builder, x, part)


def feed_forward(builder: Builder, x: Value, layer: Layer) -> Value:
    """Return a layer's feed-forward part; experts that GPUs share are given a GPU's own part of the sequence."""
    with builder.tape.alive(*((x,) if builder.settings.divided else ())):
        if isinstance(layer.feed_forward, MixtureOfExperts):
            return _experts(builder, x, layer.feed_forward)
        assert layer.feed_forward is not None
        return mlp(builder, whole_rows(builder, x), layer.feed_forward, builder.settings.names.mlp)


def _experts(builder: Builder, x: Value, part: MixtureOfExperts) -> Value:
    """Return routed experts, whose code is imported for them alone."""
    from memplan.step.feed_forwards.every_expert import every_expert
    from memplan.step.feed_forwards.expert_modules import expert_modules
    from memplan.step.feed_forwards.mixture_of_experts import mixture
    from memplan.step.feed_forwards.torchtitan_mixture import torchtitan_mixture

    taped = torchtitan_mixture if builder.settings.code.experts_apart else mixture
    taped = every_expert if part.every_expert else taped
    taped = expert_modules if part.modules else taped
    return taped(builder, x, part, builder.settings.names.mlp)
