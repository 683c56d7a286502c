"""A vision tower on tape: what opens it, every kind of block once, and what closes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from memplan.documents.frozen_values import dataclass
from memplan.model.tower import TowerKind
from memplan.step.playing.recomputation import NOTHING_AGAIN, Recomputation
from memplan.step.playing.section import Section
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant, Played
from memplan.step.tapes.taped_operations import Mode, Weight
from memplan.step.tower.pooled_sections import pooled_block, pooled_closing, pooled_opening
from memplan.step.tower.stacked_sections import deep_section, stacked_block, stacked_closing, stacked_opening
from memplan.step.tower.tower_sections import Named, cast_pixels, closing_section, opening_section, tower_block
from memplan.step.tower.tower_settings import ROW_AND_COLUMN_BYTES, TAP_BYTES, TowerSettings
from memplan.training.resolved import TrainingSetup

Kinds = tuple[tuple[int, int], ...]
"""Runs of equal blocks: which of the kinds they are of, and how many they are."""


@dataclass(frozen=True, slots=True)
class TowerCode:
    """What makes the parts of a tower of one kind, and where their parameters are."""

    first: tuple[str, ...]  # What the names of the parameters before the blocks begin with
    block: str  # The same of a block's
    last: tuple[str, ...]  # The same of those behind the blocks
    opening: Callable[[TowerSettings, Named], Section]  # Makes the part before the blocks
    inner: Callable[[TowerSettings, Named, bool, bool, int], Section]  # Makes a block
    closing: Callable[[TowerSettings, Named, bool, int, int], Section]  # Makes the part behind the blocks


CODE: Mapping[TowerKind, TowerCode] = {
    "windows": TowerCode(
        ("visual.patch_embed",), "visual.blocks.{}", ("visual.merger",), opening_section, tower_block, closing_section
    ),
    "pooled": TowerCode(
        ("vision_tower.embeddings",),
        "vision_tower.encoder.layers.{}",
        ("vision_tower.post_layernorm", "multi_modal_projector"),
        pooled_opening,
        pooled_block,
        pooled_closing,
    ),
    "stacked": TowerCode(
        ("visual.patch_embed", "visual.pos_embed"),
        "visual.blocks.{}",
        ("visual.merger",),
        stacked_opening,
        stacked_block,
        stacked_closing,
    ),
}
"""Kind of a tower -> what makes its parts."""


@dataclass(frozen=True, slots=True)
class TowerOnTape:
    """The parts of a tower on tape."""

    settings: TowerSettings  # What they depend on
    opening: Section  # Patches made of pixels
    blocks: tuple[Section, ...]  # One block of each kind
    runs: Kinds  # Runs of equal blocks, in order
    closing: Section  # The projector, and what puts its result among tokens
    again: bool = False  # Whether checkpointing is of its blocks
    deep: Section | None = None  # What merges patches behind some blocks, for early layers
    deep_runs: tuple[int, ...] = ()  # Runs behind whose last block that stands

    @property
    def graph(self) -> bool:
        """Whether what the blocks return needs a gradient."""
        return self.closing.entry.needs_gradient

    @property
    def tables(self) -> Form:
        """The tables of cosines and sines."""
        return single_form(Part.ACTIVATIONS, Quantity.PATCHES, self.settings.table_bytes)

    @property
    def tokens(self) -> Form:
        """What tokens become, or its gradient."""
        width = self.settings.text_width * self.settings.text_bytes
        return single_form(Part.ACTIVATIONS, Quantity.TOKENS, width)

    @property
    def leaf(self) -> Form:
        """What patches become, or a block is given, where that is made to need a gradient, and nothing trains it: a leaf, which its gradient stays with."""
        if self.settings.leaf == "none":
            return ZERO
        width = self.settings.shape.hidden_size * self.settings.stream_bytes
        return single_form(Part.ACTIVATIONS, Quantity.PATCHES, width)

    @property
    def leaf_apart(self) -> Form:
        """The leaf where no block saves it."""
        return self.leaf if self.settings.leaf == "patches" else ZERO

    @property
    def patches(self) -> Form:
        """What the first block is given, which a tower has a name for, where the block does not save it."""
        first = self.blocks[self.runs[0][0]]
        saved = {storage for node in first.tape.nodes for storage in node.saved}
        if first.entry.needs_gradient and (self.again or first.entry.storage in saved):
            return ZERO
        return single_form(Part.ACTIVATIONS, Quantity.PATCHES, first.entry.coefficient)

    def named_form(self) -> Form:
        """Return what the tower has names for, or its caller, while its blocks run."""
        if self.settings.shape.kind == "pooled":
            return self.patches
        positions = single_form(Part.ACTIVATIONS, Quantity.PATCHES, ROW_AND_COLUMN_BYTES)
        saved = {storage for node in self.opening.tape.nodes for storage in node.saved}
        pixels = ZERO if self.opening.entry.storage in saved else single_form(*cast_pixels(self.settings))
        if self.settings.shape.kind == "stacked":  # ``pos_embeds``, and taps where the graph has them not
            taps = next(own for item in self.opening.tape.operations if item.name == "taps" for own in item.makes)
            size = 4 * self.settings.shape.hidden_size + (0 if taps in saved else TAP_BYTES)
            positions += single_form(Part.ACTIVATIONS, Quantity.PATCHES, size)
        return positions + pixels + self.tables

    def results(self, *, graph: bool) -> Iterator[tuple[Quantity, int, int]]:
        """Yield quantity, width and bytes of an element of all that it returns, but for what the ``graph`` has: the last block's rows, and images'."""
        shape, tape, entry = self.settings.shape, self.closing.tape, self.closing.entry
        made = {item.name: tape.storages[item.makes[0]][2] for item in reversed(tape.operations) if item.makes}
        if shape.kind == "pooled":  # rows of the last norm, of which a copy is pooled
            width = made["copy"] // shape.hidden_size
            yield Quantity.PATCHES, shape.hidden_size, width
        else:
            width = made["cat"] // shape.output_size
            if not (graph and entry.storage in tape.saved_storages()):
                yield Quantity.PATCHES, shape.hidden_size, entry.element_bytes
        yield Quantity.IMAGE_TOKENS, shape.output_size, width
        if self.deep is not None:
            output = self.deep.output
            yield Quantity.IMAGE_TOKENS, output.width * len(self.deep_runs), output.element_bytes

    @property
    def handed(self) -> Form:
        """What one block hands on to an early layer, or its gradient."""
        if self.deep is None:
            return ZERO
        return single_form(Part.ACTIVATIONS, Quantity.IMAGE_TOKENS, self.deep.output.coefficient)

    @property
    def stream(self) -> Form:
        """What a block returns, or its gradient."""
        return single_form(Part.ACTIVATIONS, Quantity.PATCHES, self.closing.entry.coefficient)

    @property
    def deep_entry(self) -> Form:
        """What is merged behind a block, where its bytes are counted with the next."""
        apart = self.deep is None or self.deep.tape.storages[self.deep.entry.storage][2] > 0
        return ZERO if apart else self.stream

    def left(self, mode: Mode) -> int:
        """Return the gradients that its backward leaves."""
        blocks = sum(self.blocks[kind].left(mode) * count for kind, count in self.runs)
        deep = 0 if self.deep is None else self.deep.left(mode) * len(self.deep_runs)
        return self.opening.left(mode) + blocks + deep + self.closing.left(mode)

    def played(self, mode: Mode, recomputation: Recomputation) -> PlayedTower:
        """Return what is alive while all parts run forward and backward."""
        way = recomputation if self.again else NOTHING_AGAIN
        blocks = tuple([block.played(mode, way) for block in self.blocks])
        deep = None if self.deep is None else self.deep.played(mode)
        return PlayedTower(self, self.opening.played(mode), blocks, self.closing.played(mode), mode, deep)


@dataclass(frozen=True, slots=True)
class PlayedTower:
    """What the parts of a tower have alive in forward and backward."""

    tape: TowerOnTape
    opening: Played
    blocks: tuple[Played, ...]
    closing: Played
    mode: Mode
    deep: Played | None = None

    @property
    def deep_saved(self) -> Form:
        """What all that merges patches for early layers has saved."""
        return ZERO if self.deep is None else self.deep.saved * len(self.tape.deep_runs)

    @property
    def saved(self) -> Form:
        """What forward leaves for backward, tables included."""
        tower = self.tape
        inside = sum((self.blocks[kind].saved * count for kind, count in tower.runs), self.opening.saved)
        graph = tower.tables + tower.leaf_apart if tower.graph else ZERO
        return inside + graph + self.deep_saved + self.closing.saved

    @property
    def carried(self) -> Form:
        """What stays besides until the whole forward ends."""
        blocks = sum((self.blocks[kind].carried * count for kind, count in self.tape.runs), self.opening.carried)
        deep = ZERO if self.deep is None else self.deep.carried * len(self.tape.deep_runs)
        return blocks + deep + self.closing.carried

    def forward(self, around: Form) -> list[Instant]:
        """Return the moments of forward.

        Args:
            around: What is there besides what tokens become.
        """
        tower = self.tape
        leaf = tower.leaf_apart if tower.graph else ZERO
        before = around + tower.tokens
        moments = [moment.around(before) for moment in self.opening.forward]
        before += tower.named_form() + leaf + self.opening.saved + self.opening.carried
        left = {kind: part.saved + part.carried for kind, part in enumerate(self.blocks)}
        after = before
        for run, (kind, count) in enumerate(tower.runs):
            moments += [moment.around(after + left[kind] * (count - 1)) for moment in self.blocks[kind].forward]
            after += left[kind] * count
            if self.deep is not None and run in tower.deep_runs:
                moments += [moment.around(after + tower.deep_entry) for moment in self.deep.forward]
                after += self.deep.saved + self.deep.carried + tower.handed
        after -= tower.tokens + tower.named_form() - (tower.tables if tower.graph else ZERO)
        return moments + [moment.around(after) for moment in self.closing.forward]

    def backward(self, around: Form) -> list[Instant]:
        """Return the moments of backward.

        Args:
            around: What is there throughout: gradients that the layers have left, and what the embedding has saved.
        """
        tower, formed = self.tape, self.tape.closing.left(self.mode)
        if not tower.closing.tape.nodes:
            return []
        below = dict[int, int]()
        for kind, count in tower.runs:
            below[kind] = below.get(kind, 0) + count
        graph = tower.tables + tower.leaf_apart if tower.graph else ZERO
        waiting = tower.handed if tower.deep is not None and tower.deep.output.needs_gradient else ZERO
        bare = around + self.opening.saved + graph + self.deep_saved + waiting * len(tower.deep_runs)
        moments = [moment.around(self._inside(below, bare)) for moment in self.closing.backward]
        if not tower.graph and not tower.deep_runs:
            return moments
        bare += tower.tokens if tower.settings.reads_tokens else ZERO
        for run, (kind, count) in reversed([*enumerate(tower.runs)]):
            if self.deep is not None and tower.deep is not None and run in tower.deep_runs:
                bare -= self.deep.saved + waiting
                inside = self._inside(below, bare) + constant_form(Part.GRADIENTS, formed) + tower.deep_entry
                inside += tower.stream if tower.graph else ZERO
                moments += [moment.around(inside) for moment in self.deep.backward]
                formed += tower.deep.left(self.mode)
            if not tower.graph:
                continue
            left = tower.blocks[kind].left(self.mode)
            below[kind] -= count
            for position in dict.fromkeys((count, 1)):
                counts = {**below, kind: below[kind] + position - 1}
                gradients = constant_form(Part.GRADIENTS, formed + left * (count - position))
                inside = self._inside(counts, bare) + gradients
                moments += [moment.around(inside) for moment in self.blocks[kind].backward]
            formed += left * count
        if not tower.graph:
            return moments
        last = bare - self.opening.saved + constant_form(Part.GRADIENTS, formed)
        return moments + [moment.around(last) for moment in self.opening.backward]

    def _inside(self, counts: Mapping[int, int], bare: Form) -> Form:
        """Return what so many blocks of each kind have saved, beside ``bare``."""
        return sum((self.blocks[kind].saved * count for kind, count in counts.items()), bare)


def tower_on_tape(settings: TowerSettings | None, weights: Mapping[str, Weight], *, again: bool) -> TowerOnTape | None:
    """Return a tower on tape, its parts the same ones each time; None for rows of text.

    Args:
        weights: Its parameters, by name relative to the model.
        again: Whether checkpointing is of its blocks.
    """
    if settings is None:
        return None
    code = CODE[settings.shape.kind]
    if settings.ahead:
        weights = {
            name: replace(weight, copy_bytes=0) if not weight.coded else weight for name, weight in weights.items()
        }
    first = tuple(part for prefix in code.first for part in _under(weights, prefix, whole=True))
    opening = code.opening(settings, first)
    own = _under(weights, code.block)
    kinds: list[tuple[bool, bool, int]] = []
    sections: list[Section] = []
    runs: list[tuple[int, int]] = []
    deep_runs: list[int] = []
    needs, width = opening.output.needs_gradient, opening.output.element_bytes
    if settings.leaf == "block" and (needs or not any(weight.trainable for _, weight in own)):
        settings = replace(settings, leaf="none")
    needs = needs or settings.leaf == "block"
    again = again and (not settings.by_layer or any(weight.trainable for _, weight in own))
    for number in range(settings.shape.blocks):
        key = (number in settings.shape.full_blocks, needs, width)
        if key not in kinds:
            kinds.append(key)
            sections.append(code.inner(settings, own, *key))
        kind = kinds.index(key)
        if runs and runs[-1][0] == kind and number - 1 not in settings.shape.deep_blocks:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
        if number in settings.shape.deep_blocks:
            deep_runs.append(len(runs) - 1)
        needs, width = sections[kind].output.needs_gradient, sections[kind].output.element_bytes
    tower = TowerOnTape(settings, opening, tuple(sections), tuple(runs), opening, again)
    resident = tower.named_form() - (tower.tables if needs else ZERO)
    size = resident.coefficient(Part.ACTIVATIONS, Quantity.PATCHES)
    last = tuple(part for prefix in code.last for part in _under(weights, prefix, whole=True))
    closing = code.closing(settings, last, needs, width, size)
    if not deep_runs:
        return replace(tower, closing=closing)
    merger = _under(weights, "visual.deepstack_merger_list.{}")
    casts = settings.block.autocast and width != 4
    deep = deep_section(settings, merger, needs, width, casts or not needs)
    return replace(tower, closing=closing, deep=deep, deep_runs=tuple(deep_runs))


def _under(weights: Mapping[str, Weight], prefix: str, *, whole: bool = False) -> tuple[tuple[str, Weight], ...]:
    """Return the parameters below a module, by name relative to it, or by their ``whole`` name."""
    own = ((name, weight) for name, weight in weights.items() if name.startswith(f"{prefix}."))
    return tuple((name if whole else name.removeprefix(f"{prefix}."), weight) for name, weight in own)


def returned_features(setup: TrainingSetup, tower: TowerOnTape | None, *, graph: bool, widened: bool = False) -> Form:
    """Return what a model returns of its tower beside logits, but for what its ``graph`` has; or fp32 copies of what is in 16 bits.

    Source:
        ``MultimodalCausalLMOutputWithPast`` in transformers/modeling_outputs.py (5.24.0): ``image_outputs``.
    """
    if tower is None or tower.settings.ahead or not setup.stack.models.returns_features:
        return ZERO
    results = tower.results(graph=graph)
    sizes = ((quantity, 4 * (size == 2) if widened else size, width) for quantity, width, size in results)
    return sum((single_form(Part.ACTIVATIONS, quantity, size * width) for quantity, size, width in sizes), ZERO)
