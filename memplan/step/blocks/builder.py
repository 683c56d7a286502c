"""Elementary operations on a tape, with the dtypes and kernels of one setup."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.model.spec import Norm
from memplan.step.blocks.block_settings import BlockSettings
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import NEW, SAME, VIEW, Reduction, Tape, Value, Weight

TOKENS, ONE = Quantity.TOKENS, Quantity.ONE


def promoted(x: Value, y: Value) -> int:
    """Return the bytes of an element of what comes of two tensors: bf16 and fp16 make fp32 (torch.promote_types)."""
    if x.element_bytes == y.element_bytes == 2 and x.foreign != y.foreign:
        return 4
    return max(x.element_bytes, y.element_bytes)


class Operations:
    """Writes operations on a tape, with the dtypes and kernels of one setup.

    What is alive in forward follows from the last operation that reads a value, and from variables and
    arguments, which :meth:`Tape.holding` stands for: they mirror those of the functions in ``memplan.lab``.

    Args:
        settings: All that they depend on besides.
        weights: Parameters by name relative to a layer, or to the model.
    """

    def __init__(self, settings: BlockSettings, weights: Mapping[str, Weight]) -> None:
        self.settings = settings
        self.profile = settings.profile
        self.weights = weights
        self.compute = settings.compute_bytes
        self.tape = Tape()

    def weight(self, name: str) -> Weight:
        """Return the parameter of this name."""
        return self.weights[name]

    def fresh(self, like: Value, width: int | None = None, element_bytes: int | None = None) -> Value:
        """Return a new tensor over the same quantity as ``like``."""
        found = self.tape.value(
            like.quantity,
            like.width if width is None else width,
            like.element_bytes if element_bytes is None else element_bytes,
            part=self.part(like),
        )
        found.foreign = like.foreign and found.element_bytes == 2
        found.apart = like.apart
        return found

    def part(self, like: Value) -> Part:
        """Return what the storage of ``like`` counts as."""
        return self.tape.storages[like.storage][0]

    def constant(self, elements: int, element_bytes: int) -> Value:
        """Return a new tensor of a size that neither batch nor length changes."""
        return self.tape.value(ONE, elements, element_bytes, needs_gradient=False, part=Part.TEMPORARIES)

    def pointwise(
        self,
        name: str,
        x: Value,
        saves: tuple[Value, ...] = (),
        element_bytes: int | None = None,
        packs: bool | None = None,
    ) -> Value:
        """Record an operation that forms one tensor of the size of ``x``; numbers that it keeps are no tensors."""
        out = self.fresh(x, element_bytes=element_bytes)
        return self.tape.apply(name, [(x, NEW)], out, saves, packs=packs)

    def cast(self, x: Value, element_bytes: int, *, foreign: bool = False) -> Value:
        """Return ``x`` in another dtype; nothing happens where it has that."""
        if (x.element_bytes, x.foreign) == (element_bytes, foreign):
            return x
        out = self.pointwise("cast", x, element_bytes=element_bytes)
        out.foreign = foreign
        return out

    def lowered(self, x: Value) -> Value:
        """Return ``x`` in the dtype of matrix products, as autocast casts it."""
        return self.cast(x, self.compute) if self.settings.autocast else x

    def add(self, x: Value, y: Value) -> Value:
        """Return ``x + y``, in the wider dtype; the gradient goes to both as it is, or cast."""
        out = self.fresh(x, element_bytes=promoted(x, y))
        ways = [(v, SAME if v.element_bytes == out.element_bytes else NEW) for v in (x, y)]
        return self.tape.apply("add", ways, out, packs=False)

    def multiply(self, x: Value, y: Value) -> Value:
        """Return ``x * y``; each is kept for the other's gradient."""
        out = self.fresh(x)
        saves = self.factors(x, y)
        return self.tape.apply("mul", [(x, NEW), (y, NEW)], out, saves)

    def factors(self, first: Value, second: Value) -> list[Value]:
        """Return what a product keeps: each factor where the other needs a gradient."""
        return [v for v, other in ((first, second), (second, first)) if other.needs_gradient]

    def dropped(self, x: Value) -> Value:
        """Return ``x`` after dropout, which keeps a mask of one byte per element."""
        if not self.settings.dropout:
            return x
        mask = self.fresh(x, element_bytes=1)
        return self.tape.apply("dropout", [(x, NEW)], self.fresh(x), [mask])

    def copied(self, x: Value, *, moves: bool = True) -> Value:
        """Return a contiguous copy of ``x`` where its dimensions do not lie in order."""
        if not moves:
            return x
        found = self.fresh(x)
        found.apart = False
        return self.tape.apply("copy", [(x, SAME)], found, packs=False)

    # -------------------------------------------------------------- projections
    def linear(self, x: Value, name: str, rows: int) -> Value:
        """Return the projection of ``x`` by the weight called ``name``, ``rows`` features wide."""
        with self.tape.holding(x):
            out = self.plain_linear(x, name, rows)
            down = self.weights.get(f"{name}.lora_A.weight")
            return out if down is None else self._adapted(x, out, name, rows, down)

    def _adapted(self, x: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
        """Return a projection with what its adapter adds."""
        own = self.cast(x, down.element_bytes, foreign=down.foreign)
        with self.tape.holding(own, out):
            if f"{name}.lora_magnitude_vector.weight" in self.weights:
                return self._with_magnitude(own, out, name, rows, down)
            low = self._low_rank(own, name, rows, down)
            return self.add(out, self.cast(self.pointwise("scale", low), out.element_bytes, foreign=out.foreign))

    def _low_rank(self, x: Value, name: str, rows: int, down: Weight) -> Value:
        return self.plain_linear(self.plain_linear(x, f"{name}.lora_A", down.rows), f"{name}.lora_B", rows)

    def _with_magnitude(self, own: Value, out: Value, name: str, rows: int, down: Weight) -> Value:
        """Return DoRA's projection: the norm of the adapted weight is a constant of each step."""
        tape = self.tape
        magnitude = self.weights[f"{name}.lora_magnitude_vector.weight"]
        norm = self._magnitude_norm(name, rows, down)
        scale = tape.value(ONE, rows, max(down.element_bytes, norm.element_bytes))
        scale.foreign = norm.foreign
        tape.apply("magnitude / norm", [], scale, [norm], [magnitude])
        with tape.holding(scale):
            base = self._without_bias(out, name)
            first = self._scaled_rows(self.pointwise("scale - 1", scale), base)
        with tape.holding(scale, first, base):
            second = self._scaled_rows(scale, self._low_rank(own, name, rows, down))
            whole = self.add(first, self.pointwise("scale", second))
        with tape.holding(base):
            return self.add(out, self.cast(whole, out.element_bytes, foreign=out.foreign))

    def _scaled_rows(self, scale: Value, x: Value) -> Value:
        """Return ``scale * x``, a number for each feature, in the wider dtype."""
        wide = promoted(scale, x)
        saves = [x, *([scale] if x.needs_gradient else [])]
        # Both products of backward are wide; that of ``x`` is cast when the other has been summed.
        cast = wide != x.element_bytes
        workspace = [(x.quantity, 2 * x.width * wide - x.coefficient if cast else x.coefficient)]
        out = self.fresh(x, element_bytes=wide)
        out.foreign = x.foreign and wide == 2
        ways = [(scale, NEW), (x, NEW)]
        reduces = Reduction(x.quantity, 1, x.width)
        return self.tape.apply("mul", ways, out, saves, workspace=workspace, reduces=reduces)

    def _magnitude_norm(self, name: str, rows: int, down: Weight) -> Value:
        """Return the norm of each row of the adapted weight, which is formed whole for it (PEFT, ``DoraLinearLayer``)."""
        tape, columns, own = self.tape, down.columns, down.element_bytes
        width = self.compute if self.settings.autocast else own
        eye = tape.make("eye", self.constant(columns * columns, own))
        same = width == own and not (self.settings.autocast and down.foreign)
        read = eye if same else tape.make("cast", self.constant(columns * columns, width), eye)
        for part in ("lora_A", "lora_B"):
            self.cast_weight(self.weight(f"{name}.{part}.weight"))
        low = tape.make("linear", self.constant(columns * down.rows, width), read, product=True)
        product = tape.make("linear", self.constant(columns * rows, width), low, product=True)
        if read is not eye:  # kept for a backward that never comes, until the product is cut off from it
            tape.graph_use[read.storage] = len(tape.operations) - 1
        product.foreign = down.foreign and not self.settings.autocast
        norm = self._norm_of_sum(product, self.weight(f"{name}.weight"), rows * columns, rows, down)
        tape.touch(eye, product)
        return norm

    def _norm_of_sum(self, product: Value, base: Weight, size: int, rows: int, down: Weight) -> Value:
        """Return the norm of each row of a base weight and of ``product`` together, ``size`` elements each."""
        tape, own = self.tape, down.element_bytes
        frozen: list[Value] = []
        if base.coded:
            scratch = [(ONE, base.decoding_bytes)]
            frozen = [tape.make("decode", self.constant(size, self.compute), scratch=scratch)]
        read = list(frozen)
        if base.element_bytes != own or base.foreign != down.foreign:
            read = [tape.make("cast", self.constant(size, own), *frozen)]
        scaled = tape.make("scale", self.constant(size, product.element_bytes), product)
        term = Value(-1, ONE, 0, own, foreign=down.foreign)
        whole = tape.make("add", self.constant(size, promoted(term, product)), scaled, *read)
        whole.foreign = product.foreign and down.foreign
        norm = tape.make("norm", self.fresh(whole, rows), whole)
        tape.touch(*frozen, whole)
        return norm

    def _without_bias(self, out: Value, name: str) -> Value:
        """Return a projection less its bias, which DoRA does not scale; autocast leaves the bias in its own dtype."""
        bias = self.weights.get(f"{name}.bias")
        if bias is None:
            return out
        term = Value(-1, ONE, 0, bias.element_bytes, foreign=bias.foreign)
        found = self.fresh(out, element_bytes=promoted(out, term))
        way = SAME if found.element_bytes == out.element_bytes else NEW
        return self.tape.apply("less bias", [(out, way)], found, packs=False)

    def plain_linear(self, x: Value, name: str, rows: int) -> Value:
        """Return a projection without adapters: keeps its input where its weight is trained."""
        weight = self.weight(f"{name}.weight")
        bias = self.weights.get(f"{name}.bias")
        with self.tape.holding(x):
            x = self.lowered(x)
            with self.tape.holding(x):
                if weight.coded:
                    return self._coded_linear(x, name, weight, bias, rows)
                return self._float_linear(x, name, weight, bias, rows)

    def _float_linear(self, x: Value, name: str, weight: Weight, bias: Weight | None, rows: int) -> Value:
        scratch = 0 if bias is None else self.cast_bias(bias, rows)
        copy = self.cast_weight(weight)
        saves = [x] if weight.trainable else []
        if copy is not None and x.needs_gradient:
            saves.append(copy)
        width = weight.element_bytes if not self.settings.autocast else self.compute
        out = self.tape.value(x.quantity, rows, width)
        out.foreign = weight.foreign and not self.settings.autocast
        used = [weight, *([bias] if bias is not None else [])]
        reads = [(x, VIEW)]
        self.tape.apply(
            f"linear {name}",
            reads,
            out,
            saves,
            used,
            scratch=[(ONE, scratch)] if scratch else [],
            packs=x.needs_gradient or weight.trainable,
            product=True,
            reduces=self.summed(x, bias),
        )
        self.tape.touch(*([copy] if copy is not None else []))
        return out

    def _coded_linear(self, x: Value, name: str, weight: Weight, bias: Weight | None, rows: int) -> Value:
        """Return the product with decoded codes, and the sum with a bias, which is a tensor of its own."""
        out = self.tape.value(x.quantity, rows, self.compute)
        saves = [x] if weight.trainable else []
        self.tape.apply(f"linear {name}", [(x, VIEW)], out, saves, [weight], custom=True, product=True)
        if bias is None:
            return out
        scratch = [] if bias.element_bytes == self.compute else [(ONE, rows * self.compute)]
        return self.tape.apply(
            "add bias",
            [(out, SAME)],
            self.fresh(out),
            weights=[bias],
            scratch=scratch,
            packs=False,
            reduces=self.summed(x, bias),
        )

    def summed(self, x: Value, bias: Weight | None) -> Reduction | None:
        """Return the sum over rows that forms a bias's gradient."""
        return Reduction(x.quantity, 1, bias.rows) if bias is not None and bias.trainable else None

    def cast_weight(self, weight: Weight) -> Value | None:
        """Return the copy that autocast makes of a float weight, kept until its region ends where it is trained in fp32."""
        if weight.coded or not weight.copy_bytes:
            return None
        copy = self.tape.make("cast weight", self.constant(weight.copy_bytes, 1))
        if weight.trainable and weight.element_bytes == 4:
            self.tape.regional.add(copy.storage)
        return copy

    def cast_bias(self, bias: Weight, rows: int) -> int:
        """Return what a bias in another dtype takes while it is added; autocast keeps its copy."""
        if self.settings.autocast:
            self.cast_weight(bias)
            return 0
        return 0 if bias.element_bytes == self.compute else rows * self.compute

    # -------------------------------------------------------------- norms
    def norm(self, x: Value, norm: Norm, name: str, size: int) -> Value:
        """Return ``x`` normalised in groups of ``size`` elements."""
        tape = self.tape
        with tape.holding(x):
            x = self.cast(x, 4) if self.settings.autocast else x
            used = [self.weights[f"{name}.{part}"] for part in ("weight", "bias") if f"{name}.{part}" in self.weights]
            casts = [
                tape.make("cast weight", tape.value(ONE, size, x.element_bytes))
                for weight in used
                if weight.element_bytes != x.element_bytes or weight.foreign
            ]
            if norm.unit_offset and self.profile.norm == "fused":
                casts = [tape.make("1 + weight", tape.value(ONE, size, x.element_bytes), *casts)]
            with tape.holding(x, *casts):
                if norm.kind == "rms" and self.profile.norm == "composite":
                    return self._composite_norm(x, norm, used, casts, x.width // size)
                return self._fused_norm(x, norm, name, used, casts, x.width // size)

    def _fused_norm(self, x: Value, norm: Norm, name: str, used: list[Weight], casts: list[Value], rows: int) -> Value:
        """Return the norm by one kernel, which keeps its input and one or two numbers a row."""
        rms = norm.kind == "rms"
        statistics = self.tape.value(x.quantity, rows * (1 if rms else 2), 4)
        saves = [x, statistics, *casts]
        return self.tape.apply(f"norm {name}", [(x, NEW)], self.fresh(x), saves, used, packs=True, custom=rms)

    def _composite_norm(self, x: Value, norm: Norm, used: list[Weight], casts: list[Value], rows: int) -> Value:
        """Return the norm as Python code writes it: squares in fp32, then the weight."""
        tape = self.tape
        wide = self.cast(x, 4)
        scratch = [(wide.quantity, 2 * wide.coefficient)]
        with tape.holding(wide):
            squares = tape.apply("pow", [(wide, NEW)], self.fresh(wide), [wide], workspace=scratch)
            means = tape.apply("mean", [(squares, NEW)], tape.value(x.quantity, rows, 4), packs=False)
            shifted = tape.apply("add", [(means, SAME)], self.fresh(means), packs=False)
            inverse = self.fresh(shifted)
            tape.apply("rsqrt", [(shifted, NEW)], inverse, [inverse])
        full = [(wide.quantity, wide.coefficient)]
        normal = tape.apply("mul", [(wide, NEW), (inverse, NEW)], self.fresh(wide), [wide, inverse], workspace=full)
        if not used:
            return self.cast(normal, x.element_bytes)
        if norm.unit_offset:
            narrow = used[0].element_bytes != 4
            read = [tape.make("cast weight", self.constant(normal.width // rows, 4))] if narrow else []
            shift = tape.make("1 + weight", tape.value(ONE, normal.width // rows, 4), *read)
            with tape.holding(normal):
                return self.cast(self._scaled(normal, used, (shift,)), x.element_bytes)
        with tape.holding(normal):
            return self._scaled(self.cast(normal, x.element_bytes), used, tuple(casts))

    def _scaled(self, x: Value, used: list[Weight], shifted: tuple[Value, ...] = ()) -> Value:
        """Return ``weight * x``, whose weight gradient is summed from a full product."""
        trained = used[0].trainable
        scratch = [(x.quantity, x.coefficient)] if trained else []
        saves = [*(shifted if x.needs_gradient else ()), *([x] if trained else [])]
        columns = used[0].rows
        reduces = Reduction(x.quantity, x.width // columns, columns)
        self.tape.apply(
            "mul weight", [(x, NEW)], out := self.fresh(x), saves, used, workspace=scratch, packs=True, reduces=reduces
        )
        self.tape.touch(*shifted)
        return out
