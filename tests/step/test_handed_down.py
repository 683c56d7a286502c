"""What layers hand on to several others waits as long as any of them has not run backward."""

import pytest

from memplan.step.layers.handed_down import Given, HandedDown, Sharing
from memplan.step.tapes.linear_forms import Part, Quantity, constant_form

GRAPH, OWN = constant_form(Part.ACTIVATIONS, 1_000), constant_form(Part.TEMPORARIES, 10)
KEYS = (Given(3, 2, True), Given(5, 2, False))
VALUES = [0] * len(Quantity)
VALUES[Quantity.ONE] = VALUES[Quantity.TOKENS] = 1


def handed(**keys):
    """Return what layer 2, which is numbered 1, makes and the fifth one reads last; of seven layers."""
    shared = (Sharing(stores=1, last=4), KEYS)
    return HandedDown(
        Given(7, 4, True), (shared,), 7, graphs=((shared[0], GRAPH),), gradient=OWN, reentrant=True, **keys
    )


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (7, set()),
        (6, {("inputs", 0, 0)}),
        (5, {("inputs", 0, 0)}),
        (4, {("inputs", 0, 0), ("keys", 1, 0)}),
        (3, {("inputs", 0, 0), ("keys", 1, 0)}),
        (2, {("inputs", 0, 0)}),
        (1, {("inputs", 0, 0), ("graph", 1, 0)}),
        (0, {("graph", 1, 0), ("graph", 1, 1)}),
    ],
)
def test_gradients_wait_from_the_first_layer_that_forms_them_to_the_one_whose_they_are(layer, names):
    assert set(handed().tensors(layer)) == names


def test_a_graph_that_is_not_called_again_keeps_nothing_for_the_embedding():
    shared = (Sharing(1, 4), KEYS)
    assert not HandedDown(keys=(shared,), graphs=((shared[0], GRAPH),)).tensors(0)


def test_keys_and_values_are_kept_but_for_those_that_the_layer_makes():
    kept = handed(keeps=True)
    assert [kept.kept_keys(layer).total_bytes(VALUES) for layer in (0, 1, 2, 3)] == [16, 16, 0, 16]
    assert handed().kept_keys().total_bytes(VALUES) == 0
    assert [kept.waiting(layer).total_bytes(VALUES) for layer in (2, 3)] == [28 - 16, 28 + 6]
    assert [kept.read(number).total_bytes(VALUES) for number in (0, 1, 2)] == [0, 0, 16]
    assert kept.left.total_bytes(VALUES) == 1_010 + 16
    assert handed(first_saves=True).embedded.total_bytes(VALUES) == 0
