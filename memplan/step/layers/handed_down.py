"""What layers are given besides the residual stream: embeddings of their own, and keys and values of earlier layers (Gemma 4 E2B).

A tensor that parts of a model share is on the tape of each. Its bytes are counted around layers, where a layer does not make it, and
so is its gradient from the backward of the last layer that reads it to that of what has made it; all between add to it in place.

Source:
    ``Gemma4TextModel.forward``, ``get_per_layer_inputs``, ``project_per_layer_inputs`` and ``Gemma4TextDecoderLayer.forward`` in
    transformers/models/gemma4/modeling_gemma4.py; ``KVSharingDict`` in transformers/cache_utils.py (5.23.0); ``select_backward`` in
    torch/csrc/autograd/FunctionsManual.cpp (v2.13.0), whose result is as large as what was selected from.
"""

from collections.abc import Container
from typing import NamedTuple

from memplan.documents.frozen_values import dataclass
from memplan.model.parameter_tensors import LAYER_INPUT
from memplan.model.spec import Attention, Layer, ModelSpec, Norm
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import TOKENS, Builder, promoted
from memplan.step.blocks.norms import normalised
from memplan.step.feed_forwards.feed_forward import activated
from memplan.step.layers.rotation import receive_tables
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Value

OWN_INPUT = "input of the layer"
"""Name of what takes a layer's own of embeddings of all."""


class Given(NamedTuple):
    """A tensor that a part is given of another part."""

    width: int  # Elements of a token
    element_bytes: int
    needs_gradient: bool
    foreign: bool = False
    quantity: Quantity = TOKENS  # What it is of that width for each of


class Handed(NamedTuple):
    """What a layer is given, and what becomes of it."""

    inputs: Given | None = None  # Embeddings of all layers, of which it takes its own, or a bias of scores for all
    width: int = 0  # Of its own
    keys: tuple[Given, ...] = ()  # Keys and values of an earlier layer, where it has none of its own
    stores: bool = False  # Whether later layers read its own
    joins: bool = False  # Whether gradients of these come to it
    keeps_graph: bool = False  # Whether what is computed again leaves them with a graph, which keeps what it has saved
    read_above: bool = (
        False  # Whether layers above read the same keys and values, whose gradients are there before its own
    )
    holds: bool = False  # Whether it is the first layer and not checkpointed, and alone keeps embeddings in the end
    last: bool = False  # Whether it is the last layer, and the first that forms a gradient of embeddings


NOTHING_HANDED = Handed()


def given(builder: Builder, tensor: Given, *, waits: bool) -> Value:
    """Return a tensor of another part on this one's tape.

    Args:
        waits: Whether its gradient is there when backward begins, so that what is formed of it here is added to that.
    """
    value = builder.tape.part_of(tensor.quantity, tensor.width, tensor.element_bytes, tensor.needs_gradient)
    value.foreign = tensor.foreign
    if waits and tensor.needs_gradient:
        builder.tape.awaited.append((value, 0))
    return value


def receive(builder: Builder, handed: Handed, layer: Layer) -> Value | None:
    """Put what a layer is given on its tape; return the embedding of its own, or None."""
    builder.given_keys = tuple([given(builder, x, waits=handed.read_above) for x in handed.keys])
    builder.stores_keys, builder.joins_keys, builder.keeps_graph = handed.stores, handed.joins, handed.keeps_graph
    if builder.settings.copies_tables and isinstance(layer.attention, Attention):
        receive_tables(builder, layer.attention)
    if handed.inputs is None:
        return None
    every = given(builder, handed.inputs, waits=not handed.last)
    if not handed.width:
        builder.score_bias = every
        return None
    if handed.holds:
        builder.tape.storages[every.storage] = (Part.ACTIVATIONS, TOKENS, every.coefficient)
    builder.tape.layer_inputs = every
    own = builder.tape.view(every, handed.width)
    return builder.tape.apply(OWN_INPUT, [(every, NEW)], own, traits=SAVES_NOTHING)


def with_own_input(builder: Builder, x: Value, own: Value, layer: Layer) -> Value:
    """Return the residual stream with what its projection, scaled by the layer's own embedding, adds."""
    gate, back, norm = LAYER_INPUT
    with builder.tape.alive(x, own):
        opened = activated(builder, linear(builder, x, gate, own.width))
        scaled = builder.product(opened, own)
        hidden = builder.settings.hidden_size
        part = normalised(builder, linear(builder, scaled, back, hidden), layer.norm, norm, hidden)
        return builder.add(x, part)


def layer_inputs(builder: Builder, embedded: Value, rows: Value, width: int, norm: Norm) -> Value:
    """Return embeddings of all layers: ``rows`` of their table, and a projection of embedded tokens besides."""
    names, tape = builder.settings.names, builder.tape
    with tape.alive(embedded, rows):
        projected = builder.pointwise("scale", linear(builder, embedded, names.layer_projection, rows.width))
        projected = normalised(builder, projected, norm, names.layer_projection_norm, width)
        with tape.alive(projected):
            return builder.pointwise("scale", builder.add(projected, rows))


def stored(builder: Builder, key: Value, value: Value) -> None:
    """Note keys and values that later layers read."""
    if builder.stores_keys:
        builder.tape.stored, builder.tape.stored_at = (key, value), len(builder.tape.operations)
        builder.named_values += [key, value]
        nodes = builder.tape.nodes_behind(key, value)
        storages = [own for node in nodes for own in (node.retained if builder.keeps_graph else node.attributes)]
        builder.tape.outlives = {key.storage, value.storage, *storages}
        joined = [x for x in (key, value) if x.needs_gradient and builder.joins_keys]
        builder.tape.awaited += [(x, x.coefficient) for x in joined]


class Sharing(NamedTuple):
    """Layers that attend to the same keys and values, numbered from 0."""

    stores: int  # The one that makes them
    last: int  # The last one that reads them


@dataclass(frozen=True, slots=True)
class HandedDown:
    """What parts of a model hand on to several others."""

    inputs: Given | None = None  # Embeddings of all layers
    keys: tuple[tuple[Sharing, tuple[Given, ...]], ...] = ()  # Keys and values, and whose they are
    layers: int = 0
    graphs: tuple[tuple[Sharing, Form], ...] = ()  # What keys and values computed again keep besides
    gradient: Form = ZERO  # That of what such a layer was given, where it stays too
    first_saves: bool = False  # Whether the first layer saves embeddings of all, and they go with that
    reentrant: bool = False  # Whether what is computed again has a graph apart
    lasts: bool = True  # Whether what layers are given is there as they run backward
    keeps: bool = False  # Whether checkpointing keeps keys and values until the layers have run backward

    def tensors(self, layer: int) -> dict[tuple[str, int, int], Form]:
        """Return, by a name, gradients that layers above have formed, in the backward of this one, and what their keys and values keep.

        Args:
            layer: Of which the first is 1; 0 stands for the embedding.
        """
        forms = dict[tuple[str, int, int], Form]()
        if self.inputs is not None and self.inputs.needs_gradient and 0 < layer < self.layers:
            forms["inputs", 0, 0] = _form(self.inputs, Part.TEMPORARIES)
        for share, keys in self.keys:
            if share.stores < layer - 1 < share.last:
                needed = [(place, one) for place, one in enumerate(keys) if one.needs_gradient]
                forms |= {("keys", share.stores, place): _form(one, Part.TEMPORARIES) for place, one in needed}
        for share, form in self.graphs:
            if layer - 1 < share.stores and (layer or self.reentrant):
                forms["graph", share.stores, 0] = form
                if share.stores != layer:  # what the next one hands on is counted with this one
                    forms["graph", share.stores, 1] = self.gradient
        return forms

    def waiting(self, layer: int) -> Form:
        """Return all of these together, less keys and values that are kept and that the layer makes itself."""
        own = self.kept_keys() - self.kept_keys(layer)
        return sum(self.tensors(layer).values(), ZERO - own)

    def kept_keys(self, layer: int = 0) -> Form:
        """Return keys and values that checkpointing keeps but for those that this layer makes, the first of which is 1."""
        others = [one for share, keys in self.keys for one in keys if share.stores != layer - 1]
        return sum((_form(one, Part.ACTIVATIONS) for one in others), ZERO) if self.keeps else ZERO

    @property
    def left(self) -> Form:
        """Keys and values, and what they keep, as long as there is a graph of the loss, which has what is called again."""
        return self.waiting(0) + self.kept_keys() if self.reentrant else ZERO

    @property
    def left_behind(self) -> Form:
        """What the embedding's backward, which was given it, adds to these: the gradient of what the first layer was given."""
        first = self.reentrant and any(share.stores == 0 for share, _ in self.graphs)
        return self.gradient if first else ZERO

    @property
    def given(self) -> Form:
        """What layers are given in backward, keys and values that checkpointing keeps among it."""
        return self.embedded + self.kept_keys()

    @property
    def made(self) -> Form:
        """Embeddings of all layers, as long as a forward runs."""
        return ZERO if self.inputs is None else _form(self.inputs, Part.TEMPORARIES)

    def read(self, number: int, cached: Container[int] = ()) -> Form:
        """Return keys and values that layers below one, which is numbered from 0, have handed on, as long as a forward runs.

        Args:
            cached: Layers whose own the cache has too, and that are counted with it.
        """
        stores = [(share.stores, keys) for share, keys in self.keys if share.stores not in cached]
        keys = [one for layer, keys in stores for one in keys if layer < number]
        return sum((_form(one, Part.TEMPORARIES) for one in keys), ZERO)

    @property
    def embedded(self) -> Form:
        """Embeddings of all layers, where they are not among what the first one saves."""
        return ZERO if self.inputs is None or self.first_saves else _form(self.inputs, Part.ACTIVATIONS)


def _form(tensor: Given, part: Part) -> Form:
    return single_form(part, tensor.quantity, tensor.width * tensor.element_bytes)


def as_given(value: Value) -> Given:
    """Return what other parts are given of a tensor."""
    return Given(value.width, value.element_bytes, value.needs_gradient, value.foreign, value.quantity)


def sharings(spec: ModelSpec, unread: bool) -> dict[bool, Sharing]:
    """Return the layers that share keys and values, within a window or not: those of the last layer of each kind that makes its own stay.

    Args:
        unread: Whether they stay where no other layer reads them (``kv_sharing_modes`` in
            transformers/models/gemma4/configuration_gemma4.py, 5.24.0).
    """
    full = frozenset(spec.full_layers)
    numbers = [(number, reuses(run.layer)) for run in spec.runs for number in range(run.first, run.first + run.count)]
    if not (unread or any(reads for _, reads in numbers)):
        return {}
    last = {number not in full: number for number, _ in numbers}
    stores = {number not in full: number for number, reads in numbers if not reads}
    return {kind: Sharing(number, last[kind]) for kind, number in stores.items()}


def reuses(layer: Layer) -> bool:
    """Tell whether a layer attends to keys and values of another."""
    return isinstance(layer.attention, Attention) and layer.attention.reuses


# -------------------------------------------------------------------- what caches have
def cached(builder: Builder, key: Value, value: Value) -> tuple[Value, Value]:
    """Return keys and values as the cache has them that a model makes for each forward and returns.

    Source:
        ``DynamicCache.update`` in transformers/cache_utils.py (4.53.3), ``DynamicLayer.update`` (4.57.6 and 5.23.0, where values are
        joined with nothing in the dtype of keys, and 5.24.0).
    """
    if builder.settings.cache == "none":
        return key, value
    if builder.settings.cache == "continued":
        return _continued(builder, key, value)
    given = [key, value]
    if builder.settings.cache != "views":
        with builder.tape.alive(key, value):
            given[0] = _joined(builder, key, key.element_bytes)
            with builder.tape.alive(given[0]):
                wide = promoted(key, value) if builder.settings.cache == "promoted-copies" else value.element_bytes
                given[1] = _joined(builder, value, wide)
    builder.tape.cached.update(x.storage for x in given)
    builder.tape.cache_stays = builder.settings.cache_stays
    builder.named_values += [] if builder.settings.cache_stays else given  # later layers too have them: ``named_cache``
    return given[0], given[1]


def _continued(builder: Builder, key: Value, value: Value) -> tuple[Value, Value]:
    """Return keys and values of all tokens, whose bytes count elsewhere, each joined while there is what it is joined of."""
    whole: list[Value] = []
    with builder.tape.alive(key, value):
        for x in (key, value):
            made = builder.tape.part_of(Quantity.CACHED_TOKENS, x.width, x.element_bytes, needs_gradient=False)
            made.foreign = x.foreign
            whole.append(builder.tape.make("join", made, x, scratch=[(Quantity.CACHED_TOKENS, x.coefficient)]))
    return whole[0], whole[1]


def _joined(builder: Builder, x: Value, element_bytes: int) -> Value:
    """Return a copy of ``x``, joined with what is empty."""
    copy = builder.fresh(x, x.width, element_bytes)
    copy.apart = False
    way = SAME if element_bytes == x.element_bytes else NEW
    return builder.tape.apply("cat", [(x, way)], copy, traits=SAVES_NOTHING)
