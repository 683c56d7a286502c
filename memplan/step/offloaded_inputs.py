"""Activations that a trainer of one GPU keeps in host memory between forward and backward: what is there, and what stays on the device.

unsloth's checkpoints copy what each layer but the last is given, into buffers. torchtune's ``OffloadActivations`` gives autograd
hooks that copy each saved tensor, under checkpointing what layers are given, what the embedding has gathered by and what the final norm saves;
the head has hooks that do nothing. The last tensors that were copied stay on the device, and each that comes back until the
backward of another node has run that needs one.

Source:
    ``initialize_unsloth_gradient_checkpointing`` and ``_grow_host_buffer`` in unsloth_zoo/gradient_checkpointing.py (2026.10.9);
    ``OffloadActivations`` in torchtune/training/_activation_offloading.py (0.6.1).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from memplan.step.ends.head_on_tape import Head
from memplan.step.losses.cross_entropy import TILES
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Quantity, single_form
from memplan.step.tapes.taped_operations import Node
from memplan.step.units.host_memory import HOOKED_BYTES, HostTensors

STASH = 5
"""Saved tensors that stay on the device while they are copied: the last so many (``max_fwd_stash_size``)."""
INDEX_BYTES = 8
WAITING_BUFFERS, WAITING_BUFFER_BYTES = 200, 256 * 1024
"""Buffers that unsloth pins before the first step, and their size: each layer's grows with the first input that it is given, and torch
keeps the pinned memory of one that has grown."""


class Waiting(NamedTuple):
    """Activations alike that are in host memory when forward has run."""

    quantity: Quantity
    size: int  # Bytes for one of that
    number: int  # How many there are
    pinned: bool = True
    least: int = 0  # Bytes below which each stays on the device

    def on_host(self, values: Sequence[int]) -> tuple[HostTensors, ...]:
        """Return the tensors, given the values of the quantities."""
        size = self.size * values[self.quantity]
        return (HostTensors("activations", size, self.number, self.pinned),) if size >= self.least else ()


def waiting_inputs(inputs: StepInputs, head: Head, layers: Mapping[int, int], *, gathers: bool) -> tuple[Waiting, ...]:
    """Return what is in host memory when forward has run.

    Args:
        layers: Bytes for a token of what a layer is given -> how many layers there are whose inputs wait there.
        gathers: Whether the embedding's backward needs the numbers of the tokens.
    """
    way = inputs.setup.stack.checkpointing.offloads
    given = tuple([Waiting(Quantity.TOKENS, size, count) for size, count in layers.items()])
    if way == "buffers":
        return *given, Waiting(Quantity.ONE, WAITING_BUFFER_BYTES, WAITING_BUFFERS)
    if not given:
        return ()
    if way == "copies":
        return tuple([part._replace(pinned=False) for part in given])
    sizes = [(Quantity.TOKENS, INDEX_BYTES)] if gathers else []
    storages = head.section.tape.storages
    if way == "hooks":
        sizes += [storages[storage][1:] for node in norm_nodes(head) for storage in node.saved]
    else:
        nodes = head.section.tape.nodes
        saved = dict.fromkeys((storage, _tensors_of(node, storage)) for node in nodes for storage in node.saved)
        for storage, count in saved:
            _, quantity, size = storages[storage]
            sizes += [(quantity, size // count)] * count
        sizes.append((Quantity.PREDICTED_TOKENS, 1))  # the mask by which losses are put back into rows
    return *given, *(Waiting(*size, 1, least=HOOKED_BYTES) for size in sizes)


def _tensors_of(node: Node, storage: int) -> int:
    """Return how many tensors a storage on tape stands for: of the statistics that tiles of logits are folded into, two."""
    return 2 if node.name == TILES and storage == node.saved[-1] else 1


def norm_nodes(head: Head) -> list[Node]:
    """Return the nodes of the final norm, and of the choice of rows behind it, that save tensors, in the order of forward."""
    nodes = takewhile(lambda node: not any(weight.is_matrix for weight in node.weights), head.section.tape.nodes)
    return [node for node in nodes if node.packs]


class Packed(NamedTuple):
    """A tensor that the hooks were given behind the last layer."""

    storage: int | None  # None for a parameter
    copied: bool  # Whether they have copied it, and not left it on the device


def packed_tensors(inputs: StepInputs, head: Head, nodes: Iterable[Node]) -> list[Packed]:
    """Return what hooks are given by some nodes behind the last layer, in order.

    A product saves its second factor first; a norm of one kernel what it is given, its weight, and a number of each row.
    """
    once, packed = inputs.setup.stack.checkpointing.offloads == "hooks-once", list[Packed]()
    for node in nodes:
        saved = [
            Packed(storage, _is_copied(inputs, *head.section.tape.storages[storage][1:])) for storage in node.saved
        ]
        given = [Packed(None, copied=False) for _ in node.weights]
        known = {other.storage for other in packed} if once else set()
        saved = [own._replace(copied=own.copied and own.storage not in known) for own in saved]
        packed += [*saved[:1], *given, *saved[1:]] if node.traits.custom else [*given, *saved]
    return packed


def _is_copied(inputs: StepInputs, quantity: Quantity, size: int) -> bool:
    """Tell whether hooks copy a tensor of so many bytes for one of a quantity."""
    least = {Quantity.ONE: HOOKED_BYTES, Quantity.PREDICTED_TOKENS: inputs.regime.copied_widths[1]}
    return size >= least.get(quantity, inputs.regime.copied_widths[0])


def inputs_left(inputs: StepInputs, head: Head, layers: int) -> int:
    """Return how many inputs of layers the hooks still keep on the device when the final norm has run.

    Args:
        layers: Layers whose inputs are in host memory.
    """
    packed = packed_tensors(inputs, head, norm_nodes(head))
    last = max((number for number, own in enumerate(packed, 1) if own.copied), default=0)
    return min(layers, max(0, STASH - last))


def gone_in_loss(inputs: StepInputs, head: Head) -> Form:
    """Return what the final norm has saved that hooks have let go of when a loss that they copy too has run."""
    tape, packed = head.section.tape, packed_tensors(inputs, head, head.section.tape.nodes)
    last = max((number for number, own in enumerate(packed, 1) if own.copied), default=0)
    norm = {storage for node in norm_nodes(head) for storage in node.saved}
    left = {own.storage for number, own in enumerate(packed, 1) if not own.copied or number > last - STASH}
    return sum((single_form(*tape.storages[storage]) for storage in norm - left), ZERO)


def behind_first(head: Head) -> set[str]:
    """Return what nodes of the norm are called whose backward runs when the hooks have let go of what they had kept since forward."""
    nodes, own = head.section.tape.nodes, norm_nodes(head)
    names = {node.name for node in nodes[: nodes.index(own[-1])]} if own else set()
    return names | {f"{name} sum" for name in names}


def left_behind(head: Head) -> tuple[tuple[Quantity, int], ...]:
    """Return what the norm's backward leaves on the device until that of the last layer has computed the layer again.

    Its last node has had it copied back, where that is not the first that asks for any.
    """
    nodes = norm_nodes(head)
    if len(nodes) == 1:
        return ()
    return tuple([head.section.tape.storages[storage][1:] for storage in nodes[0].saved])
