"""What selective checkpointing saves, and how far a part is computed again."""

import json

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.step.playing.recomputation import Recomputation
from memplan.step.playing.section import Section, play
from memplan.step.playing.section_events import section_events
from memplan.step.tapes.linear_forms import Part, Pieces, Quantity, quantities
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import NEW, Traits, Value, Weight

ONE_TOKEN = quantities(1, 1, (1, 1), Pieces(1))
WIDTHS = (3, 5, 7, 11)


def chain(*, last_is_plain: bool = False) -> tuple[Tape, Value, Value]:
    """Products of these widths, one after another, each of a trained weight; an operation that saves nothing behind them."""
    tape = Tape()
    entry = x = tape.given(Quantity.TOKENS, 1, 1)
    for width in WIDTHS:
        out = tape.value(Quantity.TOKENS, width, 1)
        traits = Traits(product=True, matrices=True)
        x = tape.apply("linear", [(x, NEW)], out, [x], [Weight(f"{width}")], traits=traits)
    if last_is_plain:
        x = tape.apply("add", [(x, NEW)], tape.value(Quantity.TOKENS, 100, 1), traits=Traits(packs=False))
    return tape, entry, x


@pytest.mark.parametrize(
    ("recomputation", "saved"),
    [
        (Recomputation("none"), 1 + 3 + 5 + 7),
        (Recomputation("full"), 1),
        (Recomputation("selective"), 1 + sum(WIDTHS)),
        (Recomputation("selective", alternate=True), 1 + 3 + 7),
    ],
)
def test_forward_leaves_the_results_of_products_that_are_saved(recomputation, saved):
    tape, entry, output = chain()
    played = play(tape, output, "first", entry, recomputation)
    assert played.saved.total_bytes(ONE_TOKEN) == saved


def test_attention_is_saved_whatever_products_are_left_out():
    tape, entry, x = chain()
    out = tape.value(Quantity.TOKENS, 13, 1)
    x = tape.apply("attention", [(x, NEW)], out, [x, out], traits=Traits(product=True))
    played = play(tape, x, "first", entry, Recomputation("selective", alternate=True))
    assert played.saved.total_bytes(ONE_TOKEN) == 1 + 3 + 7 + 13


def test_what_an_operation_returns_and_nobody_reads_goes_before_its_callers_names_do():
    tape = Tape()
    entry = x = tape.given(Quantity.TOKENS, 1, 1)
    x = tape.apply("linear", [(x, NEW)], tape.value(Quantity.TOKENS, 3, 1), weights=[Weight("3")])
    mask, out = tape.value(Quantity.TOKENS, 1, 1), tape.value(Quantity.TOKENS, 5, 1)
    tape.apply("dropout", [(x, NEW)], (mask, out), [mask])
    events = section_events(Section(tape, entry, out), "first", Recomputation("full"))
    freed = [code >> 1 for code in events.forward if code & 1]
    assert freed == [mask.storage, x.storage]


def test_a_function_in_python_lets_go_of_its_names_from_the_first_on():
    for custom in (False, True):
        tape = Tape()
        entry = tape.given(Quantity.TOKENS, 1, 1)
        traits = Traits(workspace=[(Quantity.TOKENS, 3), (Quantity.TOKENS, 5)], custom=custom)
        out = tape.apply("loss", [(entry, NEW)], tape.value(Quantity.TOKENS, 2, 1), [entry], traits=traits)
        events = section_events(Section(tape, entry, out), "first")
        freed = [events.storages[code >> 1][2] for code in events.backward if code & 1]
        assert [size for size in freed if size in (3, 5)] == ([3, 5] if custom else [5, 3])


@pytest.mark.parametrize(
    ("whole", "peak"),
    [
        (False, 1 + 100 + 11),  # the input, the gradient that came in, and that of the last product's result
        (True, 1 + 11 + 3 + 5 + 7 + 11 + 100),  # all results again, the last one's included
    ],
)
def test_a_part_is_computed_again_to_its_end_only_where_nothing_stops_it(whole, peak):
    tape, entry, output = chain(last_is_plain=True)
    played = play(tape, output, "first", entry, Recomputation("full", whole=whole))
    assert played.saved.of(Part.ACTIVATIONS)[Quantity.TOKENS] == 1
    assert max(instant.form.total_bytes(ONE_TOKEN) for instant in played.backward) == peak


@pytest.mark.parametrize(("targets", "planned"), [(None, False), ("q_proj", False), ("all-linear", True)])
def test_products_that_are_kept_are_not_clipped_in_place(tmp_path, targets, planned):
    """As torch, which stops there; what an adapter adds to is not kept, and the trace runs."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1}
    text = json.dumps({"model_type": "olmo", "clip_qkv": 8.0, "vocab_size": 97, **shape})
    (tmp_path / "config.json").write_text(text)
    adapter = {} if targets is None else {"adapter": {"kind": "lora", "rank": 4, "targets": [targets]}}
    given = {"gpu": "h100", "config": "bf16-adamw", "activation_checkpointing": "selective", "set": adapter}
    if planned:
        assert plan_by_share(tmp_path, **given).verdict == "fits"
    else:
        with pytest.raises(CannotAnswerError, match="clips in place"):
            plan_by_share(tmp_path, **given)
