"""Which layers hand tensors down to others, and what each is given, as layers are put on tapes one after another."""

from memplan.model.spec import LayerRun, ModelSpec
from memplan.step.blocks.builder import TOKENS
from memplan.step.layers.handed_down import (
    NOTHING_HANDED,
    OWN_INPUT,
    Given,
    Handed,
    HandedDown,
    Sharing,
    as_given,
    reuses,
    sharings,
)
from memplan.step.playing.section import Section
from memplan.step.tapes.linear_forms import ZERO, Form, Part, single_form
from memplan.step.tapes.taped_operations import Value
from memplan.training.resolved import TrainingSetup


class Handing:
    """What layers are given besides the residual stream.

    Args:
        embedded: Embeddings of all layers, on the tape of the model's embedding; None for none.
    """

    def __init__(self, spec: ModelSpec, setup: TrainingSetup, embedded: Value | None) -> None:
        self._spec, self._setup = spec, setup
        self._sharings, self._stored = _sharings(spec, setup), dict[bool, Section]()
        self._layer_inputs = None if embedded is None else as_given(embedded)

    def note(self, run: LayerRun, handed: Handed, section: Section) -> None:
        """Note the tape of a run's layers, which later ones may have keys and values of."""
        if handed.stores:
            self._stored[run.first not in self._spec.full_layers] = section

    @property
    def _cuts_keys(self) -> bool:
        """Whether gradients of keys and values that an earlier layer has made go nowhere: its forward had no graph."""
        return self._setup.checkpointing != "none" and self._setup.stack.checkpointing.reentrant

    def to(self, run: LayerRun) -> Handed:
        """Return what a run's layers are given besides the residual stream."""
        spec = self._spec
        if self._layer_inputs is None and not self._sharings:
            return NOTHING_HANDED
        kind = run.first not in spec.full_layers
        share = self._sharings.get(kind)
        keys = self._keys(kind) if reuses(run.layer) else ()
        stores = share is not None and share.stores == run.first
        above = share is not None and share.last != run.first
        last = run.first + run.count == spec.num_hidden_layers
        checkpointed = self._setup.checkpointing != "none"
        graphs = stores and not self._cuts_keys
        holds = run.first == 0 and not checkpointed and spec.layer_input > 0
        return Handed(
            self._layer_inputs,
            spec.layer_input,
            keys,
            stores,
            graphs and above,
            graphs and checkpointed,
            above,
            holds,
            last,
        )

    def down(self, first: Section) -> HandedDown:
        """Return what parts hand on to several others, once all layers have been noted; ``first`` is the first one."""
        keeps = self._setup.checkpointing != "none"
        keys = [(share, self._keys(kind)) for kind, share in self._sharings.items()]
        graphs = [
            (share, _kept_graph(self._stored[kind], reentrant=self._cuts_keys))
            for kind, share in self._sharings.items()
            if keeps
        ]
        entries = [self._stored[kind].entry for kind in self._sharings if self._cuts_keys]
        gradient = max((x.coefficient for x in entries if x.needs_gradient), default=0)
        return HandedDown(
            self._layer_inputs,
            tuple(keys),
            self._spec.num_hidden_layers,
            tuple(graphs),
            single_form(Part.TEMPORARIES, TOKENS, gradient),
            _saves_inputs(first),
            self._cuts_keys,
            self._spec.layer_input > 0,
            keeps,
        )

    def _keys(self, kind: bool) -> tuple[Given, ...]:
        """Return keys and values that later layers of a kind are given."""
        keys = [as_given(value) for value in self._stored[kind].tape.stored]
        return tuple([one._replace(needs_gradient=one.needs_gradient and not self._cuts_keys) for one in keys])


def _sharings(spec: ModelSpec, setup: TrainingSetup) -> dict[bool, Sharing]:
    """Return the layers that share keys and values, those that no other layer reads too where a model's code hands them on."""
    return sharings(spec, spec.architecture in setup.stack.models.hands_unread)


def alone(spec: ModelSpec, setup: TrainingSetup) -> set[int]:
    """Return the layers, numbered from 0, that are given, or hand on, something else than those like them."""
    numbers = {number for share in _sharings(spec, setup).values() for number in share}
    if spec.encoder is not None and spec.encoder.distance_buckets:
        return {spec.num_hidden_layers - 1}
    return numbers | ({0, spec.num_hidden_layers - 1} if spec.layer_input else set())


def _saves_inputs(first: Section) -> bool:
    """Tell whether the first layer saves embeddings of all layers, and has them for a storage of its own."""
    given = first.tape.layer_inputs
    return (
        given is not None
        and bool(first.tape.storages[given.storage][2])
        and given.storage in first.tape.saved_storages()
    )


def _kept_graph(section: Section, *, reentrant: bool) -> Form:
    """Return what stays with keys and values that are computed again, besides these.

    A graph of what is computed again apart ends in copies of what the layer was given, which have their gradients.
    """
    tape, given = section.tape, section.entry
    own = {value.storage for value in tape.stored}
    form = sum((single_form(Part.TEMPORARIES, *tape.storages[other][1:]) for other in tape.outlives - own), ZERO)
    if reentrant:
        own_input = sum(node.outputs[0].coefficient for node in tape.nodes if node.name == OWN_INPUT)
        form += single_form(Part.TEMPORARIES, given.quantity, given.coefficient + own_input)
    return form
