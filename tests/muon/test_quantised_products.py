"""Products in 8 and 4 bits: the emulation is exact, and what the notes say about INT4 holds."""

import pytest
import torch

from memplan.errors import UnknownNameError
from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_
from memplan.muon.orthogonalisation.products import FORMATS, QuantisedProduct, quantised_products
from memplan.muon.orthogonalisation.schedules import resolved_schedule
from memplan.muon.stores.optimizer_errors import OptimizerError

EIGHT_BITS = [name for name in FORMATS if name != "int4"]


def orthogonality_error(matrix):
    size = matrix.shape[0]
    return ((matrix @ matrix.mT - torch.eye(size)).norm() / size**0.5).item()


def rounded(operand, name, dim):
    """Independent rounding in double precision, with a scale along ``dim``."""
    largest = operand.double().abs().amax(dim, keepdim=True)
    if name.startswith("fp8"):
        dtype = torch.float8_e4m3fn if name == "fp8-e4m3" else torch.float8_e5m2
        scale = largest / torch.finfo(dtype).max
        return (operand.double() / scale).float().to(dtype).double() * scale
    maximum = 127 if name == "int8" else 7
    scale = largest / maximum
    return (operand.double() / scale).round() * scale


@pytest.mark.parametrize("name", FORMATS)
def test_emulation_is_the_product_of_the_rounded_operands(name):
    torch.manual_seed(0)
    left, right = torch.randn(24, 1500), torch.randn(1500, 16)
    out = torch.empty(24, 16)
    QuantisedProduct(name)(left, right, out)
    expected = rounded(left, name, 1) @ rounded(right, name, 0)
    assert ((out.double() - expected).norm() / expected.norm()).item() < 2e-5


def test_addend_alpha_beta_and_batches():
    torch.manual_seed(0)
    left, addend = torch.randn(2, 8, 32), torch.randn(2, 8, 8)
    out, alone = torch.empty(2, 8, 8), torch.empty(8, 8)
    product = QuantisedProduct("int8")
    product(left, left.mT, out, addend, 0.5, 2.0)
    product(left[1], left[1].mT, alone)
    assert torch.allclose(out[1], 0.5 * addend[1] + 2.0 * alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("scaling", ["tensor", "row", 128])
def test_eight_bits_in_the_gram_product_cost_little(name, scaling):
    torch.manual_seed(0)
    schedule = resolved_schedule("you-jiacheng", 5)
    matrix = torch.randn(256, 256)
    plain = orthogonality_error(newton_schulz_(matrix.clone(), schedule))
    ours = orthogonality_error(
        newton_schulz_(matrix.clone(), schedule, products=quantised_products(name, scaling=scaling))
    )
    assert ours < plain + (0.15 if name == "fp8-e5m2" else 0.05)


def test_finer_scales_are_better_where_all_products_are_int8():
    torch.manual_seed(0)
    schedule = resolved_schedule("you-jiacheng", 5)
    matrix = torch.randn(512, 512)
    everywhere = ("gram", "square", "apply")
    errors = [
        orthogonality_error(
            newton_schulz_(matrix.clone(), schedule, products=quantised_products("int8", everywhere, scaling))
        )
        for scaling in ("tensor", "row", 128)
    ]
    assert errors == sorted(errors, reverse=True)


def test_int4_diverges():
    torch.manual_seed(0)
    products = quantised_products("int4", ("gram", "square", "apply"))
    matrix = newton_schulz_(torch.randn(512, 512), resolved_schedule("keller-jordan", 5), products=products)
    assert not orthogonality_error(matrix) < 10


def test_unknown_names_are_refused():
    with pytest.raises(UnknownNameError, match="int8"):
        quantised_products("int-8")
    with pytest.raises(UnknownNameError, match="gram"):
        quantised_products("int8", ("grams",))
    with pytest.raises(OptimizerError, match="scaling"):
        quantised_products("int8", scaling=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EIGHT_BITS)
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_native_agrees_with_the_emulation(name, scaling):
    left = torch.randn(256, 512, device="cuda").bfloat16()
    native, emulated = (torch.empty(256, 256, device="cuda") for _ in range(2))
    QuantisedProduct(name, scaling)(left, left.mT, native)
    QuantisedProduct(name, scaling, native=False)(left, left.mT, emulated)
    assert ((native - emulated).norm() / emulated.norm()).item() < 1e-2
