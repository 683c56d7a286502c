"""A tape: the operations of one part of a training step, and what each saves for backward.

The memory of a step follows from a few rules of reverse-mode autograd. An operation saves some
of its inputs and outputs until its own backward has run; backward visits operations in reverse,
forms one gradient for each input that needs one, then drops what was saved and the gradient it
came with. Given a part's operations, the bytes alive at every point of its backward follow by
counting. Sizes stay linear forms in the quantities of :data:`QUANTITIES`, so a tape is played
once for a model and gives closed forms for every batch and sequence length.

Source: pytorch torch/csrc/autograd/engine.cpp and input_buffer.cpp (v2.13.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, Storage, single_form
from memplan.step.tapes.taped_operations import PLAIN, Node, Operation, Pass, Sizes, Traits, Value, Weight

FOREVER = 2**62
"""Index of an operation that never comes."""


@dataclass(slots=True)
class Tape:
    """Operations in the order of forward."""

    storages: list[Storage] = field(default_factory=list)  # What is allocated, each once
    nodes: list[Node] = field(default_factory=list)  # Operations that have a backward
    operations: list[Operation] = field(default_factory=list)  # All operations
    instant: str = ""  # Instant that operations added from now on belong to in backward
    # Storage -> index of the operation after which forward's own names for it are gone.
    last_use: dict[int, int] = field(default_factory=dict)
    regional: set[int] = field(default_factory=set)  # Storages that stay until a region of autocast ends
    # Weight's name -> the copy that such a region makes of it, once.
    cast_weights: dict[str, Value] = field(default_factory=dict)
    # Storage -> index of the operation after which a graph that is cut off lets it go; forward under checkpointing, or
    # without gradients, has no such graph.
    graph_use: dict[int, int] = field(default_factory=dict)
    # Storages that the model returns, and whether they stay as long as its loss has a graph, or until that is formed.
    cached: set[int] = field(default_factory=set)
    cache_stays: bool = False
    # Storages that are there before the first operation, and not as long as forward runs.
    given_until: set[int] = field(default_factory=set)
    # Index of an operation -> the module that begins with it, where that is not the operation's own.
    entered: dict[int, str] = field(default_factory=dict)
    # Name of a bias that a product casts for good -> the bytes of an element that it has from then on.
    cast_biases: dict[str, int] = field(default_factory=dict)
    # Index of the first operation behind the region of autocast, where that ends before the tape does.
    region_end: int = FOREVER
    # A result that a library asks for a gradient of, with which it stays as long as the graph of the loss.
    leaf: Value | None = None
    # A result that a layer's function returns besides its output: the model has a name for it until the next layer has
    # run, and reentrant checkpointing is given zeros for its gradient.
    returned: Value | None = None
    # What was given, or made here, that others have read: its gradient is there when backward begins, of so many bytes
    # for each unit of its quantity, or none where these are counted elsewhere.
    awaited: list[tuple[Value, int]] = field(default_factory=list)
    stored: tuple[Value, ...] = ()  # Keys and values that later layers read
    # What nodes behind these have saved and the graph of what is computed again keeps, where that stays with them.
    outlives: set[int] = field(default_factory=set)
    stored_at: int = FOREVER  # Index of the operation before which these are stored
    layer_inputs: Value | None = None  # Embeddings of all layers, made or given here
    # Results that the model has names for until all layers have run, or a loss's function until it returns.
    named: tuple[Value, ...] = ()
    between: bool = (
        False  # Whether moments of operations added from now on lie between those of others (``Operation.between``)
    )
    # Whether what it is given lies in host memory between forward and backward, which has a copy of it or a view of a buffer.
    waits: bool = False
    # What hooks have copied back for the part behind, and keep until backward has run the first node that needs what is
    # computed again; None where what is given is not in host memory by hooks.
    lingers: Sizes | None = None
    # What is made here for the function that is called again, with what is given.
    called_with: tuple[int, ...] = ()
    # Whether what autocast casts as it is computed again stays until its backward is done, which is in the same region.
    region_stays: bool = False
    phases: dict[int, str] = field(
        default_factory=dict
    )  # Index of an operation -> what moments of forward are called from it on
    sums_anew: bool = False  # Whether sums of gradients are new tensors always, as those of DTensors are

    def value(self, quantity: Quantity, width: int, element_bytes: int, part: Part = Part.ACTIVATIONS) -> Value:
        """Return a new tensor of ``width`` elements per unit of ``quantity``, with a storage of its own.

        Whether it needs a gradient is known by the operation that makes it.
        """
        coefficient = width * element_bytes
        self.storages.append((part, quantity, coefficient))
        return Value(len(self.storages) - 1, quantity, coefficient, element_bytes)

    def given(self, quantity: Quantity, width: int, element_bytes: int, needs_gradient: bool = True) -> Value:
        """Return a tensor that is there before the first operation, and as long as forward runs."""
        value = self.value(quantity, width, element_bytes)
        value.needs_gradient = needs_gradient
        self.last_use[value.storage] = FOREVER
        return value

    def part_of(self, quantity: Quantity, width: int, element_bytes: int, needs_gradient: bool = True) -> Value:
        """Return a tensor that is there like :meth:`given`, and whose bytes count elsewhere: a view of a larger one."""
        value = self.given(quantity, width, element_bytes, needs_gradient)
        self.storages[value.storage] = (Part.ACTIVATIONS, quantity, 0)
        return value

    def apply(
        self,
        name: str,
        inputs: Sequence[tuple[Value, Pass]],
        outputs: Value | Sequence[Value],
        saves: Sequence[Value] = (),
        weights: Sequence[Weight] = (),
        traits: Traits = PLAIN,
    ) -> Value:
        """Record an operation and return its (first) output.

        Args:
            name: What formulas call it.
            inputs: Inputs with the way their gradients are made.
            outputs: Outputs, made by :meth:`value` or :meth:`view`.
            saves: Tensors that stay until this operation's backward is done.
            traits: What else it does.
        """
        made = (outputs,) if isinstance(outputs, Value) else tuple(outputs)
        used = tuple([pair for pair in inputs if pair[0].needs_gradient])
        needs = bool(used) or any(weight.trainable for weight in weights)
        for value in made:
            value.needs_gradient = needs
        new = self._first_seen([value for value, _ in inputs], (*made, *saves))
        attributes = tuple(dict.fromkeys([value.storage for value in traits.attributes]))
        storages = tuple(dict.fromkeys([value.storage for value in saves]))
        read, node = tuple(weights), None
        if needs:
            packs = traits.packs
            if packs is None:
                packs = bool(storages) or any(not weight.coded for weight in read)
            node = Node(name, used, made, storages, read, traits, self.instant, packs, attributes, self.between)
            self.nodes.append(node)
        last = traits.custom or not set(new).isdisjoint(storages)
        self.operations.append(Operation(name, new, read, traits, node, last, self.between))
        return made[0]

    def make(
        self,
        name: str,
        output: Value,
        *reads: Value,
        scratch: Sizes = (),
        product: bool = False,
        decoding: tuple[int, ...] = (),
    ) -> Value:
        """Record an operation whose result has no gradient, whatever it reads; return its output."""
        output.needs_gradient = False
        new = self._first_seen(reads, (output,))
        traits = Traits(scratch=scratch, product=product, decoding=decoding)
        self.operations.append(Operation(name, new, (), traits, None, False, self.between))
        return output

    def _first_seen(self, reads: Sequence[Value], written: Sequence[Value]) -> tuple[int, ...]:
        """Note what the next operation reads and writes; return the storages that it allocates."""
        index = len(self.operations)
        last_use = self.last_use
        for value in reads:
            if last_use.get(value.storage, 0) <= index:
                last_use[value.storage] = index
        new = []
        for value in written:
            if value.storage not in last_use:
                last_use[value.storage] = index
                new.append(value.storage)
        return tuple(new)

    def cut(self, nodes: int, operations: int) -> tuple[int, ...]:
        """Cut off the graph of what has been recorded since there were so many nodes and operations; return what that has saved."""
        saved = tuple(storage for node in self.nodes[nodes:] for storage in node.saved)
        del self.nodes[nodes:]
        for operation in self.operations[operations:]:
            operation.node = None
        return saved

    def touch(self, *values: Value) -> None:
        """Note that names of ``values`` are alive up to the operation recorded last; they go after what that was given alone."""
        index = len(self.operations) - 1
        for value in values:
            self.last_use[value.storage] = max(index, self.last_use.pop(value.storage, 0))

    def ends(self, *values: Value) -> None:
        """Note that nothing names ``values`` after the operation recorded last, though they were given."""
        for value in values:
            self.last_use[value.storage] = max(len(self.operations) - 1, 0)
            self.given_until.add(value.storage)

    def stays(self, *values: Value) -> None:
        """Note that the loop has names for what was given, or made, as long as for what the model returns."""
        self.cached.update(value.storage for value in values)
        self.cache_stays = self.cache_stays or bool(values)

    def leaves_region(self) -> None:
        """Note that a region of autocast ends with the operation recorded last: what it has cast goes."""
        self.region_end = len(self.operations)

    def alive(self, *values: Value) -> _Variables:
        """Keep ``values`` alive in forward until the block ends, as variables of a function are."""
        return _Variables(self, values)

    def view(self, base: Value, width: int | None = None) -> Value:
        """Return another look at ``base``'s storage, ``width`` elements of it per unit."""
        coefficient = base.coefficient if width is None else width * base.element_bytes
        return Value(base.storage, base.quantity, coefficient, base.element_bytes, base.needs_gradient, base.foreign)

    def nodes_behind(self, *results: Value) -> list[Node]:
        """Return the nodes that results come of."""
        reached, nodes = {id(value) for value in results}, list[Node]()
        for node in reversed(self.nodes):
            if not reached.isdisjoint(map(id, node.outputs)):
                nodes.append(node)
                reached.update(id(value) for value, _ in node.inputs)
        return nodes

    def saved_form(self) -> Form:
        """Return what all operations together save for backward, each storage once."""
        return sum((single_form(*self.storages[storage]) for storage in self.saved_storages()), ZERO)

    def saved_storages(self) -> dict[int, None]:
        """Return the storages that operations save for backward, each once."""
        saved = dict.fromkeys(storage for node in self.nodes for storage in node.retained)
        return {**saved, **dict.fromkeys(self.cached)} if self.cache_stays else saved

    def saved_tensors(self) -> list[tuple[str, Quantity, int, Part]]:
        """Return (operation, quantity, coefficient, part) of every storage saved, by the first operation that saves it."""
        first: dict[int, str] = {}
        for node in self.nodes:
            for storage in node.retained:
                first.setdefault(storage, node.name)
        return [(name, self.storages[s][1], self.storages[s][2], self.storages[s][0]) for s, name in first.items()]


class _Variables:
    """A block of a function whose variables stay alive until it ends."""

    __slots__ = ("_tape", "_values")

    def __init__(self, tape: Tape, values: tuple[Value, ...]) -> None:
        self._tape, self._values = tape, values

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._tape.touch(*self._values)
