"""Elementary operations on a tape, with the dtypes and kernels of one setup."""

from collections.abc import Mapping

from memplan.step.blocks.block_settings import BlockSettings
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value, Weight

TOKENS, ONE = Quantity.TOKENS, Quantity.ONE


def promoted(x: Value, y: Value) -> int:
    """Return the bytes of an element of what comes of two tensors: bf16 and fp16 make fp32 (torch.promote_types)."""
    if x.element_bytes == y.element_bytes == 2 and x.foreign != y.foreign:
        return 4
    return max(x.element_bytes, y.element_bytes)


class Builder:
    """Writes operations on a tape, with the dtypes and kernels of one setup.

    What is alive in forward follows from the last operation that reads a value, and from variables and
    arguments, which :meth:`Tape.alive` stands for: they mirror those of the functions in ``memplan.lab``.

    Args:
        settings: All that they depend on besides.
        weights: Parameters by name relative to a layer, or to the model.

    Attributes:
        named_values: Values that a layer's code has names for until it returns.
        named: The same for attention.
        tables: Cosines and sines of the layer's own call, where it is not given the model's.
        given_keys: Keys and values of an earlier layer, where this one has none of its own.
        score_bias: What scores of all layers get added, where they do.
        stores_keys: Whether later layers read those of this one.
        joins_keys: Whether their gradients come to these.
        keeps_graph: Whether these keep the graph that they come of when they are computed again.
    """

    def __init__(self, settings: BlockSettings, weights: Mapping[str, Weight]) -> None:
        self.settings = settings
        self.profile = settings.profile
        self.weights = weights
        self.compute = settings.compute_bytes
        self.tape = Tape(sums_anew=settings.divided)
        self.named_values: list[Value] = []
        self.named: list[Value] = []
        self.tables: tuple[Value, ...] = ()
        self.given_keys: tuple[Value, ...] = ()
        self.score_bias: Value | None = None
        self.stores_keys = self.joins_keys = self.keeps_graph = False

    def weight(self, name: str) -> Weight:
        """Return the parameter of this name."""
        return self.weights[name]

    def fresh(self, like: Value, width: int | None = None, element_bytes: int | None = None) -> Value:
        """Return a new tensor over the same quantity as ``like``."""
        tensor = self.tape.value(
            like.quantity,
            like.width if width is None else width,
            like.element_bytes if element_bytes is None else element_bytes,
            part=self.tape.storages[like.storage][0],
        )
        tensor.foreign = like.foreign and tensor.element_bytes == 2
        tensor.apart, tensor.flat = like.apart, like.flat
        return tensor

    def constant(self, elements: int, element_bytes: int) -> Value:
        """Return a new tensor of a size that neither batch nor length changes."""
        return self.tape.value(ONE, elements, element_bytes, part=Part.TEMPORARIES)

    def pointwise(
        self,
        name: str,
        x: Value,
        saves: tuple[Value, ...] = (),
        element_bytes: int | None = None,
        packs: bool | None = None,
    ) -> Value:
        """Record an operation that forms one tensor of the size of ``x``; numbers that it saves are no tensors."""
        out = self.fresh(x, element_bytes=element_bytes)
        return self.tape.apply(name, [(x, NEW)], out, saves, traits=Traits(packs=packs))

    def clamp(self, x: Value, bounds: int) -> Value:
        """Return ``x`` within so many bounds: its backward has a mask of bytes for each, and a zero, when it forms the gradient."""
        # Source: ``clamp_backward`` in torch/csrc/autograd/FunctionsManual.cpp (v2.13.0)
        masks = [(ONE, x.element_bytes), *[(x.quantity, x.width)] * bounds]
        traits = Traits(workspace=masks, forms_last=True)
        return self.tape.apply("clamp", [(x, NEW)], self.fresh(x), [x], traits=traits)

    def cast(self, x: Value, element_bytes: int, *, foreign: bool = False) -> Value:
        """Return ``x`` in another dtype; nothing happens where it has that."""
        if (x.element_bytes, x.foreign) == (element_bytes, foreign):
            return x
        out = self.pointwise("cast", x, element_bytes=element_bytes)
        out.foreign = foreign
        return out

    def lowered(self, x: Value) -> Value:
        """Return ``x`` in the dtype of matrix products, as autocast casts it."""
        if not self.settings.under_autocast:
            return x
        if not x.leaf or x.element_bytes < 4:
            return self.cast(x, self.compute)
        copies, name = self.tape.cast_weights, f"given {x.storage}"
        if name not in copies:
            copies[name] = self.cast(x, self.compute)
            self.tape.regional.add(copies[name].storage)
        return copies[name]

    def add(self, x: Value, y: Value) -> Value:
        """Return ``x + y``, in the wider dtype; the gradient goes to both as it is, or cast."""
        out = self.fresh(x, element_bytes=promoted(x, y))
        ways = [(v, SAME if v.element_bytes == out.element_bytes else NEW) for v in (x, y)]
        return self.tape.apply("add", ways, out, traits=SAVES_NOTHING)

    def multiply(self, x: Value, y: Value) -> Value:
        """Return ``x * y``; each is saved for the other's gradient."""
        out = self.fresh(x)
        saves = self.factors(x, y)
        return self.tape.apply("mul", [(y, NEW), (x, NEW)], out, saves)

    def product(self, x: Value, y: Value, name: str = "mul") -> Value:
        """Return ``x * y`` in the wider dtype; the gradient of a narrower factor is formed wide, and cast."""
        wide = promoted(x, y)
        narrow = [v for v in (x, y) if v.element_bytes != wide]
        formed = [(v.quantity, v.width * wide) for v in narrow]
        casts = [(v.quantity, v.coefficient) for v in narrow]
        saves, ways = self.factors(x, y), [(y, NEW), (x, NEW)]
        out = self.fresh(x, element_bytes=wide)
        return self.tape.apply(name, ways, out, saves, traits=Traits(workspace=formed, casts=casts))

    def repeated_product(self, x: Value, factor: Value) -> Value:
        """Return ``x`` times what one of both repeats, whose gradient is summed from a whole product."""
        like = factor if x.quantity is ONE else x
        repeated = x if like is factor else factor
        out = self.fresh(like, element_bytes=max(x.element_bytes, factor.element_bytes))
        full = [(out.quantity, out.coefficient)]
        narrow = like.element_bytes < out.element_bytes  # its gradient is formed wide, and cast
        traits = Traits(
            workspace=full * (repeated.needs_gradient + narrow),
            casts=[(like.quantity, like.coefficient)] if narrow else [],
        )
        saves, ways = self.factors(x, factor), [(factor, NEW), (x, NEW)]
        return self.tape.apply("mul", ways, out, saves, traits=traits)

    def factors(self, first: Value, second: Value) -> list[Value]:
        """Return what a product saves: each factor where the other needs a gradient, the second first as torch lets go of them."""
        return [v for v, other in ((second, first), (first, second)) if other.needs_gradient]

    def dropped(self, x: Value, probability: float | None = None) -> Value:
        """Return ``x`` after dropout, by default the model's, which saves a mask of one byte per element."""
        if not (self.settings.dropout if probability is None else probability):
            return x
        mask = self.fresh(x, element_bytes=1)
        out = self.fresh(x)
        self.tape.apply("dropout", [(x, NEW)], (mask, out), [mask])
        return out

    def dropped_behind(self, x: Value) -> Value:
        """Return what attention adds after dropout, unless that was inside, or never is."""
        return self.dropped(x) if self.settings.code.drops_attention == "behind" else x

    def copied(self, x: Value, *, moves: bool = True) -> Value:
        """Return a contiguous copy of ``x`` where its dimensions do not lie in order."""
        if not moves:
            return x
        copy = self.fresh(x)
        copy.apart = False
        return self.tape.apply("copy", [(x, SAME)], copy, traits=SAVES_NOTHING)

    def cast_weight(self, weight: Weight) -> Value | None:
        """Return the copy that autocast makes of a float weight, which stays until its region ends where it is trained in fp32."""
        if weight.coded or not weight.copy_bytes:
            return None
        if weight.name in self.tape.cast_weights:
            return self.tape.cast_weights[weight.name]
        copy = self.tape.make("cast weight", self.constant(weight.copy_bytes, 1))
        if weight.trainable and weight.element_bytes == 4 and not self.is_view(weight):
            self.tape.regional.add(copy.storage)
            self.tape.cast_weights[weight.name] = copy
        return copy

    def is_view(self, weight: Weight) -> bool:
        """Tell whether products are given another look at a parameter: LitGPT turns those of adapters, but for one, and Falcon its layers'."""
        # ``FalconLinear.forward`` in transformers/models/falcon/modeling_falcon.py (5.24.0)
        names, code = self.settings.names, self.settings.code
        if ".lora_" in weight.name:
            return code.adapts_parts and not weight.name.endswith(f".{names.qkv}.lora_A.weight")
        return code.own_linear and weight.name.startswith(names.layer)

    def cast_bias(self, bias: Weight, rows: int) -> int:
        """Return what a bias in another dtype takes while it is added; autocast saves its copy."""
        if self.settings.autocast:
            self.cast_weight(bias)
            return 0
        return 0 if bias.element_bytes == self.compute else rows * self.compute

    def sliced(self, x: Value, width: int) -> Value:
        """Return a slice of ``x``, whose gradient is a whole tensor again; all of it is ``x`` itself."""
        if width == x.width:
            return x
        return self.tape.apply("slice", [(x, NEW)], self.tape.view(x, width), traits=SAVES_NOTHING)

    def cache_state(self, width: int, x: Value, *named: Value) -> None:
        """Note that the cache a model makes for each forward is given a copy of so many numbers of each sequence, as wide as ``x``.

        Args:
            x: What they are copied of.
            named: What has a name then.

        Source:
            ``LinearAttentionLayer.lazy_initialization`` and ``update_conv_state`` in transformers/cache_utils.py (5.23.0).
        """
        if self.settings.cache == "none":
            return
        copy = self.tape.make("state", self.tape.value(Quantity.SEQUENCES, width, x.element_bytes), x, *named)
        self.tape.cached.add(copy.storage)
        self.tape.cache_stays = self.settings.cache_stays

    def last_tokens(self, x: Value) -> Value:
        """Return the tokens of ``x`` behind those that a cache had before: all, as it had none."""
        if self.settings.cache == "none":
            return x
        return self.tape.apply("slice", [(x, NEW)], self.tape.view(x), traits=SAVES_NOTHING)


def looked_at(builder: Builder, x: Value) -> Value:
    """Return another look at a tensor, from which its gradient comes back as a copy."""
    view = builder.tape.view(x)
    view.apart = x.apart
    return builder.tape.apply("look", [(x, NEW)], view, traits=SAVES_NOTHING)
