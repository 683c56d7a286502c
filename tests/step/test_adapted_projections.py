"""What projections with adapters save and take, as PEFT 0.21.2 and bitsandbytes 0.50.2 run them: by hand, from their sources.

Every size is that of a toy: 32 wide in, 48 out, rank 4; bytes are for one token.
"""

from dataclasses import replace

import pytest

from memplan.catalog.stacks import StackProjections
from memplan.catalog.training_config import Adapter, TrainingConfig
from memplan.model.model import Model
from memplan.model.spec import Attention, Layer, LayerRun, Mlp, ModelSpec, Norm
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.block_settings import BlockSettings, Regime, block_settings
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.playing.section import play
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import Weight
from memplan.training.resolution.resolve_config import resolve

PEFT = StackProjections("input", codes_cloned=True, codes_scales=True, adapter_sum="wide")
BUNDLED = StackProjections("compute", codes_cloned=False, codes_scales=False, adapter_sum="narrow")
IN, OUT, RANK = 32, 48, 4


def settings(catalog, **changes) -> BlockSettings:
    layer = Layer(Attention(2, 2, 16, 16), Mlp(8), Norm())
    model = Model.from_spec(ModelSpec("toy", "llama", 96, IN, (LayerRun(layer, 1),), Norm()), "test")
    setup = resolve(TrainingConfig("", adapter=Adapter(dtype="bf16")), catalog, "test")
    return replace(block_settings(model.spec, setup, Regime()), projections=PEFT, **changes)


def builder_of(given: BlockSettings, *, coded: bool, adapter_bytes: int, cast: bool = False) -> Builder:
    """Return a builder with the weights of one adapted projection."""
    names = {"lora_A": (RANK, IN), "lora_B": (OUT, RANK)}
    weights = {
        f"q.{part}.weight": Weight(
            f"q.{part}.weight",
            element_bytes=adapter_bytes,
            copy_bytes=2 * rows * columns if cast else 0,
            copy_saved=True,
            rows=rows,
            columns=columns,
        )
        for part, (rows, columns) in names.items()
    }
    copy = 2 * IN * OUT if coded else 0
    scales = 4 * IN * OUT // 64 if coded else 0
    base = Weight("q.weight", trainable=False, coded=coded, copy_bytes=copy, rows=OUT, columns=IN, scales_bytes=scales)
    return Builder(given, {**weights, "q.weight": base})


def played(given: BlockSettings, *, input_bytes: int, **kinds):
    """Play one adapted projection whose input needs a gradient; return (played, saved by operation, result)."""
    builder = builder_of(given, **kinds)
    entry = builder.tape.given(TOKENS, IN, input_bytes)
    out = linear(builder, entry, "q", OUT)
    saved = {name: size for name, quantity, size, _ in builder.tape.saved_tensors() if quantity is Quantity.TOKENS}
    return play(builder.tape, out, "first", entry), saved, out


def test_fp32_adapters_on_16_bits_work_on_a_copy_in_fp32_and_their_sum_is_cast_back(catalog):
    """peft/tuners/lora/layer.py, ``Linear.forward``: x.to(fp32), added in fp32, ``result.to(torch_result_dtype)``."""
    _, saved, out = played(settings(catalog), coded=False, adapter_bytes=4, input_bytes=2)
    assert saved == {"linear q.lora_A": 4 * IN, "linear q.lora_B": 4 * RANK}
    assert out.coefficient == 2 * OUT


def test_a_part_is_added_before_it_is_cast_or_after(catalog):
    """PEFT casts the sum of a result in 16 bits and a part in fp32, the bundled reference the part."""
    operations = {}
    for name, rule in (("wide", PEFT), ("narrow", BUNDLED)):
        given = replace(settings(catalog), projections=rule)
        builder = builder_of(given, coded=False, adapter_bytes=4)
        linear(builder, builder.tape.given(TOKENS, IN, 2), "q", OUT)
        made = [(op.name, [builder.tape.storages[s][2] for s in op.makes]) for op in builder.tape.operations]
        operations[name] = made[made.index(("scale", [4 * OUT])) + 1 :]
    assert operations["wide"] == [("add", [4 * OUT]), ("cast", [2 * OUT])]
    assert operations["narrow"] == [("cast", [2 * OUT]), ("add", [2 * OUT])]


@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_dropout_keeps_a_mask_and_the_dropped_copy_instead_of_the_input(catalog, probability):
    """``lora_A(dropout(x))``: lora_A saves what it is given, dropout one byte an element (native_dropout)."""
    given = settings(catalog, adapter_dropout=probability)
    _, saved, _ = played(given, coded=False, adapter_bytes=2, input_bytes=2)
    mask = {"dropout": IN} if probability else {}
    assert saved == {**mask, "linear q.lora_A": 2 * IN, "linear q.lora_B": 2 * RANK}


def test_codes_give_back_the_dtype_that_they_were_given_and_save_nothing(catalog):
    """bitsandbytes/nn/modules.py, ``Linear4bit.forward``: x.to(compute), product, ``.to(inp_dtype)``; then a clone."""
    found, saved, out = played(settings(catalog), coded=True, adapter_bytes=4, input_bytes=4)
    assert saved == {"linear q.lora_A": 4 * IN, "linear q.lora_B": 4 * RANK}
    assert out.coefficient == 4 * OUT
    scales, decoded = 4 * IN * OUT // 64, 2 * IN * OUT
    ones = {i.form.coefficient(Part.TEMPORARIES, Quantity.ONE) for i in found.forward if i.operation == "linear q"}
    assert ones == {decoded + 2 * scales}  # scales decoded, scales with their mean, and the weight
    backward = [i.form.coefficient(Part.TEMPORARIES, Quantity.ONE) for i in found.backward if i.operation == "linear q"]
    assert max(backward) == decoded + scales


def test_under_autocast_codes_are_multiplied_and_adapted_without_a_cast_in_between(catalog):
    """peft/tuners/lora/bnb.py: ``requires_conversion = not torch.is_autocast_enabled()``; the sum of fp32 and bf16 is fp32."""
    given = settings(catalog, autocast=True, under_autocast=True)
    _, saved, out = played(given, coded=True, adapter_bytes=4, input_bytes=4, cast=True)
    assert saved == {"linear q.lora_A": 2 * IN, "linear q.lora_B": 2 * RANK}
    assert out.coefficient == 4 * OUT
