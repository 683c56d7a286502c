"""The events of what a model makes once a forward and calls every layer with: positions, masks, rotary tables.

Source:
    ``create_causal_mask`` and ``eager_mask`` in transformers/masking_utils.py; ``forward`` of ``LlamaModel`` and of
    ``LlamaRotaryEmbedding`` in transformers/models/llama/modeling_llama.py (5.23.0).
"""

from collections.abc import Sequence

from memplan.model.families.family_fields import FamilyCode
from memplan.step.ends.head_on_tape import NAMED
from memplan.step.events.event_stream import EventStream, PlayedSection
from memplan.step.kernels.family_code import family_code
from memplan.step.kernels.layer_arguments import graph_has_tables, layer_arguments, mask_scratch
from memplan.step.layers.handed_down import HandedDown
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.step_inputs import StepInputs, retained_arguments, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity


class ModelArguments:
    """What one forward makes for its layers, and when it goes.

    Args:
        taped: The model on tape, whose head has what goes with the model's own names.
    """

    __slots__ = (
        "_code",
        "_given",
        "_handed",
        "_inputs",
        "_named",
        "_section",
        "_stays",
        "_stream",
        "_values",
        "copied",
    )

    def __init__(self, stream: EventStream, inputs: StepInputs, taped: ModelOnTape, values: Sequence[int]) -> None:
        self._stream, self._inputs, self._values = stream, inputs, values
        self._section, self._given = taped.head.section, taped.settings.arguments
        self._code = family_code(inputs.setup.stack, inputs.spec.architecture)
        self._named: dict[Quantity, list[int]] = {}
        self._stays: list[int] = []
        self.copied: list[int] = []  # Tables that layers are called with copies of
        self._handed = HandedTensors(stream, taped.handed, values)

    def follow(self, number: str, part: PlayedSection, place: int) -> None:
        """Write what comes behind the forward of a part: the embedding, which is the first one, or a layer, which has a number."""
        if number or not place:
            self._handed.hand_on(number)
        if not place:
            self.make(part)

    def stand_by(self, number: str, *, first: bool) -> None:
        """Write what comes before the backward of a part, the ``first`` of which is norm and head."""
        if not first:
            self._handed.stand_by(int(number) + 1 if number else 0)

    def left(self, *, called_again: bool) -> list[int]:
        """Return what goes with the graph of the loss: what parts have handed on, and what layers were given where that calls them again."""
        return [*(self._stays if called_again else ()), *self._handed.left()]

    def make(self, embedding: PlayedSection) -> None:
        """Write what comes before the first layer, behind the embedding."""
        inputs = self._inputs
        for quantity, storage in embedding.named:
            self._named.setdefault(quantity, []).append(storage)
        every = layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked)
        retained = retained_arguments(inputs)
        self._stream.of("activations")
        for quantity in (Quantity.POSITIONS, Quantity.SCORES, Quantity.TOKENS):
            stays, size = (form.coefficient(Part.ACTIVATIONS, quantity) for form in (retained, every))
            if quantity is not Quantity.SCORES and inputs.spec.learned_positions:
                continue  # told with the embeddings, which the model has names for
            self._stays += self._made(quantity, stays)
            self._named.setdefault(quantity, []).extend(self._made(quantity, size - stays))
        if (tables := tables_of_graph(inputs)) is not ZERO:
            graph = graph_has_tables(inputs.spec, inputs.setup)
            (self._stays if graph else self.copied).extend(self._tables(tables))
        self._stream.of("activations")

    def named_by(self, head: PlayedSection) -> None:
        """Let a head free what only the model has names for, which its tape has as given."""
        first = self._section.entry.storage + 1
        for place, (quantity, _) in enumerate(self._given):
            if named := self._named.get(quantity):
                head.is_given(first + place, named)

    def all_named_by(self, head: PlayedSection, embedded: Sequence[int]) -> None:
        """Let a head that saves nothing free all these behind its norm, and the embeddings, where nothing else has them."""
        self._given = self._given or NAMED
        given = [quantity for quantity, _ in self._given]
        going = [*embedded, *self._stays, *self.copied, *self.left(called_again=False)]
        for quantity in self._named.keys() - given:
            going += self._named.pop(quantity)
        self._named.setdefault(given[0], []).extend(going)
        self.named_by(head)
        if not self._named[given[0]]:
            head.is_given(self._section.entry.storage + 1, ())

    @property
    def staying(self) -> list[int]:
        """What stays as long as layers may be called with it again, or their graph reads it."""
        return self._stays

    def _made(self, quantity: Quantity, size: int) -> list[int]:
        """Return positions, or one mask after the other, formed of booleans; sizes are bytes of a unit of the quantity."""
        stream, value = self._stream, self._values[quantity]
        if not size or quantity is not Quantity.SCORES:
            return [stream.allocate(size * value)] if size else []
        width = self._inputs.setup.embedded_bytes if size >= self._inputs.setup.embedded_bytes else 1
        masks = []
        square = self._values[Quantity.SQUARE]
        scratch = mask_scratch(self._inputs.spec, masked=self._inputs.regime.masked).coefficient(
            Part.TEMPORARIES, Quantity.SQUARE
        )
        for number in range(size // width):
            if scratch and number == size // width - 1:  # the one of windows
                apart = stream.allocate_all([scratch // 2 * square] * 2)
                stream.free(apart[0])
                pairs = [apart[1], stream.allocate(square)]
            else:
                pairs = stream.allocate_all([square] * 2)
            stream.free(pairs[0])
            masks.append(stream.allocate(value))
            stream.free(pairs[1])
            if width > 1:
                added = stream.allocate(width * value)
                stream.free(masks.pop())
                masks.append(added)
        return masks

    def _tables(self, form: Form) -> list[int]:
        """Return cosines and sines of each base, formed in fp32 and cast."""
        stream, pairs = self._stream, _pairs(self._inputs, self._code)
        size = form.total_bytes(self._values) // (2 * pairs)
        wide = size * 4 // _table_bytes(self._inputs, self._code)
        made: list[int] = []
        for _ in range(pairs):
            stream.of("temporaries")
            halves = not (self._code.half_tables or self._code.complex_rotary)
            angles = [stream.allocate(wide // 2 if halves else wide)]
            angles += [stream.allocate(wide)] if halves else []
            tables = []
            for _ in ("cos", "sin"):
                table, scaled = stream.allocate_all([wide, wide])
                stream.free(table)
                tables.append(scaled)
            if wide != size:
                stream.of("activations")
                casts = stream.allocate_all([size, size])
                stream.free_all([*angles, *tables])
                tables = casts
            else:
                stream.free_all(angles)
            made += tables
        return made


class HandedTensors:
    """What parts of a model hand on to several others: embeddings of all layers, keys and values, and gradients of these."""

    __slots__ = ("_handed", "_stream", "_there", "_values")

    def __init__(self, stream: EventStream, handed: HandedDown, values: Sequence[int]) -> None:
        self._stream, self._handed, self._values = stream, handed, values
        self._there: dict[tuple[str, int, int], int] = {}

    def hand_on(self, number: str) -> None:
        """Allocate what a part hands on behind its forward; the embedding has no ``number``."""
        handed = self._handed
        self._stream.of("activations")
        if not number and handed.embedded is not ZERO:
            self._there["made", 0, 0] = self._stream.allocate(handed.embedded.total_bytes(self._values))
        if number:
            self._keep(int(number))

    def _keep(self, layer: int) -> None:
        """Allocate keys and values that a layer, the first of which is 0, has made and checkpointing keeps."""
        for share, keys in self._handed.keys if self._handed.keeps else ():
            for place, one in enumerate(keys if share.stores == layer else ()):
                size = one.width * one.element_bytes * self._values[Quantity.TOKENS]
                self._there["kept", share.stores, place] = self._stream.allocate(size)

    def stand_by(self, layer: int) -> None:
        """Allocate what is there in the backward of a layer, the first of which is 1, and free what is gone by then; 0 is the embedding."""
        forms = self._handed.tensors(layer)
        made = ("made",) if self._handed.lasts else ()
        stay = (*made, "kept") if layer else ("kept",) if self._handed.reentrant else ()
        self._stream.of("temporaries")
        for key in [key for key in self._there if key not in forms and (key[0] not in stay or self._makes(key, layer))]:
            self._stream.free(self._there.pop(key))
        if layer or self._handed.reentrant:
            self._keep(layer)  # what the layer above has made in the place of those of forward
        for key in [key for key in forms if key not in self._there]:
            self._there[key] = self._stream.allocate(forms[key].total_bytes(self._values))

    def _makes(self, key: tuple[str, int, int], layer: int) -> bool:
        """Tell whether a layer makes keys and values that are kept as it is computed again, in the place of those of forward."""
        return key[:2] == ("kept", layer - 1)

    def left(self) -> list[int]:
        """Return what goes with the graph of the loss."""
        left, self._there = [*self._there.values()], {}
        return left


def _pairs(inputs: StepInputs, code: FamilyCode) -> int:
    """Return the pairs of tables that there are, one of cosines and sines for each base."""
    return 1 if inputs.spec.num_hidden_layers < code.masks_from else max(inputs.spec.rotary_tables, 1)


def _table_bytes(inputs: StepInputs, code: FamilyCode) -> int:
    """Return the bytes of an entry of a table."""
    return 4 if inputs.regime.wide_tables or code.wide_rotary or code.complex_rotary else inputs.setup.residual_bytes
