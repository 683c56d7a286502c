"""Forms are vectors: sums and multiples act on every coefficient, whichever parts are empty."""

import random
from itertools import product

import pytest

from memplan.step.tapes.linear_forms import (
    NOTHING,
    ZERO,
    Form,
    Part,
    Pieces,
    Quantity,
    constant_form,
    quantities,
    single_form,
)

PLACES = tuple(product(Part, Quantity))
VALUES = quantities(3, 1000, (50_257, 768), Pieces(8))


def drawn(rng: random.Random) -> Form:
    """A form of which some parts are empty, in either way that a part can be."""
    empty = (NOTHING, (0,) * len(Quantity))
    return Form(tuple(rng.choice([*empty, tuple(rng.randrange(-(2**40), 2**40) for _ in Quantity)]) for _ in Part))


def coefficients(form: Form) -> list[int]:
    return [form.coefficient(part, quantity) for part, quantity in PLACES]


@pytest.mark.parametrize("seed", range(20))
def test_sums_and_multiples_act_on_every_coefficient(seed):
    rng = random.Random(seed)
    one, other, factor = drawn(rng), drawn(rng), rng.choice([-3, 0, 1, 32])
    assert coefficients(one + other) == [x + y for x, y in zip(coefficients(one), coefficients(other), strict=True)]
    assert coefficients(one - other) == [x - y for x, y in zip(coefficients(one), coefficients(other), strict=True)]
    assert coefficients(one * factor) == [factor * x for x in coefficients(one)]
    assert one + ZERO == ZERO + one == one


@pytest.mark.parametrize("seed", range(20))
def test_the_whole_is_the_sum_of_its_parts(seed):
    form = drawn(random.Random(seed))
    by_hand = [sum(c * v for c, v in zip(form.of(part), VALUES, strict=True)) for part in Part]
    assert list(form.part_bytes(VALUES)) == [form.bytes(part, VALUES) for part in Part] == by_hand
    assert form.total_bytes(VALUES) == sum(by_hand)
    assert sum((form.only(part) for part in Part), ZERO) == form
    assert list(form.totals()) == [sum(form.coefficient(part, q) for part in Part) for q in Quantity]


@pytest.mark.parametrize(("part", "quantity"), PLACES)
def test_one_tensor_has_one_coefficient(part, quantity):
    assert {place for place, c in zip(PLACES, coefficients(single_form(part, quantity, 7)), strict=True) if c} == {
        (part, quantity)
    }
    assert single_form(part, quantity, 7).bytes(part, VALUES) == 7 * VALUES[quantity]
    assert single_form(part, quantity, 0) == ZERO
    assert constant_form(part, 7) == single_form(part, Quantity.ONE, 7)
