"""Elementary operations on a tape, with the dtypes and kernels of one setup."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.forms import Part, Quantity
from memplan.model.spec import ModelSpec, Norm
from memplan.setup import TrainingSetup
from memplan.tape import NEW, SAME, VIEW, Tape, Value, Weight

TOKENS, ONE = Quantity.TOKENS, Quantity.ONE


class Operations:
    """Writes operations on a tape, with the dtypes and kernels of one setup.

    Args:
        spec: The model.
        setup: The training setup.
        weights: Parameters by name relative to where ``prefix`` points.
        dropout: Probability that applies.
    """

    def __init__(self, spec: ModelSpec, setup: TrainingSetup, weights: Mapping[str, Weight], dropout: float) -> None:
        self.spec = spec
        self.setup = setup
        self.profile = setup.profile
        self.weights = weights
        self.dropout = dropout
        self.compute = setup.compute_bytes
        self.tape = Tape()

    def weight(self, name: str) -> Weight:
        """Return the parameter of this name."""
        return self.weights[name]

    def fresh(self, like: Value, width: int | None = None, element_bytes: int | None = None) -> Value:
        """Return a new tensor over the same quantity as ``like``."""
        return self.tape.value(
            like.quantity,
            like.width if width is None else width,
            like.element_bytes if element_bytes is None else element_bytes,
            part=self.part(like),
        )

    def part(self, like: Value) -> Part:
        """Return what the storage of ``like`` counts as."""
        return self.tape.storages[like.storage][0]

    def pointwise(self, name: str, x: Value, saves: tuple[Value, ...] = (), element_bytes: int | None = None) -> Value:
        """Record an operation that forms one tensor of the size of ``x``."""
        out = self.fresh(x, element_bytes=element_bytes)
        return self.tape.apply(name, [(x, NEW)], out, saves)

    def cast(self, x: Value, element_bytes: int) -> Value:
        """Return ``x`` with elements of another size; nothing happens where they have it."""
        if x.element_bytes == element_bytes:
            return x
        return self.pointwise("cast", x, element_bytes=element_bytes)

    def lowered(self, x: Value) -> Value:
        """Return ``x`` in the dtype of matrix products, as autocast casts it."""
        return self.cast(x, self.compute) if self.setup.autocast else x

    def add(self, x: Value, y: Value) -> Value:
        """Return ``x + y``, in the wider dtype; the gradient goes to both as it is, or cast."""
        wider = x if x.element_bytes >= y.element_bytes else y
        out = self.fresh(wider)
        ways = [(v, SAME if v.element_bytes == out.element_bytes else NEW) for v in (x, y)]
        return self.tape.apply("add", ways, out)

    def multiply(self, x: Value, y: Value) -> Value:
        """Return ``x * y``; each is kept for the other's gradient."""
        out = self.fresh(x)
        saves = [v for v, other in ((y, x), (x, y)) if other.needs_gradient]
        return self.tape.apply("mul", [(x, NEW), (y, NEW)], out, saves)

    def dropped(self, x: Value) -> Value:
        """Return ``x`` after dropout, which keeps a mask of one byte per element."""
        if not self.dropout:
            return x
        mask = self.fresh(x, element_bytes=1)
        return self.tape.apply("dropout", [(x, NEW)], self.fresh(x), [mask])

    def linear(self, x: Value, name: str, rows: int) -> Value:
        """Return the projection of ``x`` by the weight called ``name``, ``rows`` features wide."""
        out = self.plain_linear(x, name, rows)
        down = self.weights.get(f"{name}.lora_A.weight")
        if down is None:
            return out
        own = self.cast(x, down.element_bytes)
        if f"{name}.lora_magnitude_vector.weight" in self.weights:
            return self._with_magnitude(own, out, name, rows, down)
        low = self.plain_linear(self.plain_linear(own, f"{name}.lora_A", down.rows), f"{name}.lora_B", rows)
        return self.add(out, self.cast(self.pointwise("scale", low), out.element_bytes))

    def _with_magnitude(self, own: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
        """Return DoRA's projection: the norm of the adapted weight is a constant of each step."""
        tape = self.tape
        magnitude = self.weights[f"{name}.lora_magnitude_vector.weight"]
        scale = tape.value(ONE, rows, down.element_bytes)
        norm = tape.value(ONE, rows, down.element_bytes, needs_gradient=False)
        tape.apply("magnitude / norm", [], scale, [norm], [magnitude])
        less, base = self.pointwise("scale - 1", scale), self._without_bias(out, name)
        first = tape.apply(
            "mul",
            [(less, NEW), (base, NEW)],
            self.fresh(base),
            [base, *([less] if base.needs_gradient else [])],
            workspace=[(base.quantity, base.coefficient)],
        )
        low = self.plain_linear(self.plain_linear(own, f"{name}.lora_A", down.rows), f"{name}.lora_B", rows)
        second = tape.apply(
            "mul",
            [(scale, NEW), (low, NEW)],
            self.fresh(low),
            [low, scale],
            workspace=[(low.quantity, low.coefficient)],
        )
        whole = self.add(first, self.pointwise("scale", second))
        return self.add(out, self.cast(whole, out.element_bytes))

    def _without_bias(self, out: Value, name: str) -> Value:
        """Return a projection less its bias, which DoRA does not scale; autocast leaves the bias in its own dtype."""
        bias = self.weights.get(f"{name}.bias")
        if bias is None:
            return out
        wide = max(out.element_bytes, bias.element_bytes)
        way = SAME if wide == out.element_bytes else NEW
        return self.tape.apply("less bias", [(out, way)], self.fresh(out, element_bytes=wide))

    def plain_linear(self, x: Value, name: str, rows: int) -> Value:
        """Return a projection without adapters: keeps its input where its weight is trained."""
        x = self.lowered(x)
        weight = self.weight(f"{name}.weight")
        used = [weight, *([self.weights[f"{name}.bias"]] if f"{name}.bias" in self.weights else [])]
        saves = [x] if weight.trainable else []
        if weight.copy_kept and weight.copy_bytes and x.needs_gradient:
            saves.append(self.tape.value(ONE, weight.copy_bytes, 1, part=Part.TEMPORARIES))
        width = weight.element_bytes if not self.setup.autocast else self.compute
        out = self.tape.value(x.quantity, rows, width)
        return self.tape.apply(f"linear {name}", [(x, VIEW)], out, saves, used)

    # -------------------------------------------------------------- norms
    def norm(self, x: Value, norm: Norm, name: str, size: int) -> Value:
        """Return ``x`` normalised in groups of ``size`` elements."""
        if self.setup.autocast:
            x = self.cast(x, 4)
        rows = x.width // size
        used = [self.weights[f"{name}.{part}"] for part in ("weight", "bias") if f"{name}.{part}" in self.weights]
        if norm.kind == "rms" and self.profile.norm == "composite":
            return self._composite_norm(x, norm, used, rows)
        statistics = 1 if norm.kind == "rms" else 2
        saves = [x, self.tape.value(x.quantity, rows * statistics, 4)]
        if norm.unit_offset or (used and used[0].element_bytes != x.element_bytes):
            saves.append(self.tape.value(ONE, size, x.element_bytes))
        return self.tape.apply(f"norm {name}", [(x, NEW)], self.fresh(x), saves, used)

    def _composite_norm(self, x: Value, norm: Norm, used: list[Weight], rows: int) -> Value:
        """Return the norm as Python code writes it: squares in fp32, then the weight."""
        tape = self.tape
        wide = self.cast(x, 4)
        scratch = [(wide.quantity, 2 * wide.coefficient)]
        squares = tape.apply("pow", [(wide, NEW)], self.fresh(wide), [wide], workspace=scratch)
        means = tape.value(x.quantity, rows, 4)
        tape.apply("mean", [(squares, NEW)], means)
        inverse = tape.value(x.quantity, rows, 4)
        tape.apply("rsqrt", [(means, NEW)], inverse, [inverse])
        full = [(wide.quantity, wide.coefficient)]
        normal = tape.apply("mul", [(wide, NEW), (inverse, NEW)], self.fresh(wide), [wide, inverse], workspace=full)
        if not used:
            return self.cast(normal, x.element_bytes)
        if norm.unit_offset:
            shifted = tape.value(ONE, normal.width // rows, 4)
            return self.cast(self._scaled(normal, used, (shifted,)), x.element_bytes)
        return self._scaled(self.cast(normal, x.element_bytes), used)

    def _scaled(self, x: Value, used: list[Weight], shifted: tuple[Value, ...] = ()) -> Value:
        """Return ``weight * x``, whose weight gradient is summed from a full product."""
        trained = used[0].trainable
        scratch = [(x.quantity, x.coefficient)] if trained else []
        saves = [*shifted, *([x] if trained else [])]
        return self.tape.apply("mul weight", [(x, NEW)], self.fresh(x), saves, used, workspace=scratch)
