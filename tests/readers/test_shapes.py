"""Explicit shapes make a Llama-like model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import InvalidFileError, MemplanError
from memplan.model.inventory import parameter_count
from memplan.model.readers.given_shapes import llama_intermediate, model_from_shapes

LLAMA_2_13B = {"layers": 40, "hidden": 5120, "heads": 40}


def test_three_numbers_give_the_models_of_the_llama_papers():
    assert parameter_count(model_from_shapes(**LLAMA_2_13B).inventory) == 13_015_864_320


def test_every_shape_can_be_given():
    model = model_from_shapes(
        layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, intermediate=8192, vocab=128_256, tied=True
    )
    assert parameter_count(model.inventory) == 3_212_749_824


@pytest.mark.parametrize(
    ("hidden", "width"), [(3200, 8704), (4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016)]
)
def test_default_width_is_that_of_llama(hidden, width):
    assert llama_intermediate(hidden) == width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 41}, r"--heads: 41 does not divide hidden_size"),
        ({"kv_heads": 7}, r"--kv-heads: 7 does not divide"),
        ({"hidden": 0}, r"--hidden: expected an integer from 1"),
        ({"hidden": True}, r"--hidden: expected an integer, got True"),
        ({"layers": 10**9}, r"--layers: expected an integer from 1 to 10,000"),
        ({"vocab": -1}, r"--vocab: expected"),
        ({"intermediate": 0}, r"--intermediate: expected"),
        ({"head_dim": 65}, r"--head-dim: 65 dimensions"),
    ],
)
def test_wrong_shapes_are_named_by_their_option(change, message):
    with pytest.raises(InvalidFileError, match=message) as caught:
        model_from_shapes(**LLAMA_2_13B | change)
    assert len(caught.value.problems) == 1


numbers = st.integers(-2, 200) | st.sampled_from([0, 2**24, 2**25, 10**30])


@given(layers=numbers, hidden=numbers, heads=numbers, kv_heads=st.none() | numbers, head_dim=st.none() | numbers)
def test_nothing_but_our_errors_escapes(layers, hidden, heads, kv_heads, head_dim):
    try:
        model = model_from_shapes(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    except MemplanError as error:
        refusal = str(error)
        assert refusal
    else:
        assert parameter_count(model.inventory) > 0
