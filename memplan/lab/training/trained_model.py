"""The lab's reference model with real weights: floats, or codes that are decoded for every product; and products at fp32's speed."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.errors import CannotAnswerError
from memplan.model.inventory import ParameterTensor, Role, expanded
from memplan.model.model import Model
from memplan.model.spec import ModelSpec
from memplan.muon.weights.quantised import QuantisedWeight
from memplan.muon.weights.quantised_layers import QuantisedEmbedding, QuantisedLinear
from memplan.muon.weights.weight_codecs import WEIGHT_FORMATS
from memplan.step.tensors.tensor_states import stored_format
from memplan.trace.jobs.reference_job import reference_options
from memplan.trace.reference.decoder import Embedding, ReferenceModel
from memplan.trace.reference.parts import Linear
from memplan.trace.reference.run_options import TORCH_DTYPES, Target
from memplan.trace.reference.weight_storage import Weight
from memplan.training.resolved import TrainingSetup
from memplan.training.stack_models import text_model

aten = torch.ops.aten
PRODUCTS = frozenset(
    overload for product in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm) for overload in (product.default, product.out)
)


class SinglePrecisionProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies 16-bit matrices of the CPU as fp32 ones, and rounds what comes out to 16 bits.

    Operands are exact in fp32, and kernels for 16 bits sum in fp32 too, so only the order of the sums
    differs: 1 in 10,000 elements by a unit in the last place, for products of 2048 x 96 by 96 x 256 in bf16.
    Without instructions for bf16 (AVX2 alone) oneDNN's own kernels take ten times as long.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS or args[0].dtype.itemsize != 2 or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
        out = kwargs.pop("out", None)
        # Every overload in PRODUCTS has one that returns its product
        product = func.overloadpacket.default(*wide, **kwargs)
        return product.to(args[0].dtype) if out is None else out.copy_(product)


def formed_in_fp32(device: str, compute_dtype: str) -> bool:
    """Tell whether 16-bit products are slow there: on a CPU in fp16, and in bf16 where it has no instructions for that."""
    bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device == "cpu" and not (bf16 and compute_dtype != "fp16")


def fast_products(device: str, compute_dtype: str) -> AbstractContextManager[Any]:
    """Return what to train under on ``device``: where they are slow, 16-bit products are formed in fp32 and rounded.

    With instructions for bf16 its own products take 0.1 to 0.6 of the time of fp32's, and the mode 30 us of every operation.
    """
    return SinglePrecisionProducts() if formed_in_fp32(device, compute_dtype) else nullcontext()  # type: ignore[no-untyped-call]


def products_of(device: str, compute_dtype: str) -> str:
    """Return how ``fast_products`` forms 16-bit products on ``device``, for a record."""
    return (
        "16-bit operands, formed in fp32 and rounded" if formed_in_fp32(device, compute_dtype) else "the device's own"
    )


INITIAL_DEVIATION = 0.02


class TrainedCodes(Weight):
    """A weight that is real codes, in the place of one whose decoding is only imitated."""

    def __init__(self, weight: QuantisedWeight, role: Role, compute_dtype: torch.dtype) -> None:
        self.shape, self.role = tuple(weight.shape), role
        self.quantized = self.trained = True
        self._home, self._tensor = None, weight.codes
        self._linear = QuantisedLinear(weight)
        self._table = QuantisedEmbedding(weight, compute_dtype)

    def product(self, x: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        assert not transposed
        out: Tensor = self._linear(x)
        return out if bias is None else out + bias.to(out.dtype)

    def looked_up(self, ids: Tensor) -> Tensor:
        """Return the rows that ``ids`` name, decoded."""
        rows: Tensor = self._table(ids)
        return rows


@dataclass(frozen=True, slots=True)
class TrainedWeight:
    """One weight of a model in training."""

    name: str  # As in the inventory
    role: Role  # Likewise
    stored: nn.Parameter | QuantisedWeight  # The parameter, or the quantised weight

    @property
    def tensor(self) -> Tensor:
        """The parameter or the codes."""
        return self.stored.codes if isinstance(self.stored, QuantisedWeight) else self.stored


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model in training, and its weights in the order of the inventory."""

    module: ReferenceModel
    weights: tuple[TrainedWeight, ...]


def trained_model(model: Model, setup: TrainingSetup, seed: int, device: str) -> TrainedModel:
    """Return a model with fresh weights, stored as the planner stores each of them.

    Matrices are normal with a deviation of 0.02, those that write to the residual stream smaller by
    ``sqrt(2 * layers)``, norms are one. Every format starts from the same numbers.

    Raises:
        CannotAnswerError: A weight has a format that cannot be trained here.

    Source:
        Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3.
    """
    model = text_model(model)
    target: Target = "cuda" if device.startswith("cuda") else "cpu"
    options = reference_options(setup, model.spec, target)
    codes = dict.fromkeys(options.coded, torch.float32)  # until their numbers are there to be encoded
    loss = "fp32" if options.profile.loss == "bf16" else options.profile.loss  # bf16 shows 3 digits of a loss
    profile = replace(options.profile, loss=loss)
    options = replace(options, profile=profile, dtypes={**options.dtypes, **codes}, coded={})
    module = ReferenceModel(model.spec, options)
    tensors = dict(expanded(model.inventory))
    numbers = InitialNumbers(model.spec, torch.Generator().manual_seed(seed), device)
    stored = _stored_weights(module, setup, tensors, numbers)
    weights = [TrainedWeight(name, tensor.role, stored[name]) for name, tensor in tensors.items()]
    return TrainedModel(module, tuple(weights))


@dataclass(frozen=True, slots=True)
class InitialNumbers:
    """Fresh numbers of weights, drawn on the CPU one tensor after another, so that they are the same on any device."""

    spec: ModelSpec
    generator: torch.Generator
    device: str

    def of(self, tensor: ParameterTensor) -> Tensor:
        """Return the numbers of one weight, fp32."""
        if len(tensor.shape) < 2:
            return torch.full(tensor.shape, 1.0 if tensor.role == "norm" else 0.0, device=self.device)
        writes = tensor.name.endswith((f".{self.spec.names.output}.weight", f".{self.spec.names.down}.weight"))
        deviation = INITIAL_DEVIATION / (sqrt(2 * self.spec.num_hidden_layers) if writes else 1.0)
        return torch.empty(tensor.shape).normal_(0.0, deviation, generator=self.generator).to(self.device)


def _stored_weights(
    module: ReferenceModel, setup: TrainingSetup, tensors: Mapping[str, ParameterTensor], numbers: InitialNumbers
) -> dict[str, nn.Parameter | QuantisedWeight]:
    """Put every weight into a model without memory, as it is stored; never more than one of them is there in fp32."""
    compute = module.run.options.compute_dtype
    made: dict[nn.Parameter, nn.Parameter | QuantisedWeight] = {}
    stored: dict[str, nn.Parameter | QuantisedWeight] = {}
    for path, part in list(module.named_modules()):
        for leaf, parameter in list(part.named_parameters(recurse=False)):
            name = f"{path}.{leaf}"
            if parameter not in made:
                made[parameter] = stored[name] = _made(numbers.of(tensors[name]), tensors[name], setup, name)
            weight = made[parameter]
            if isinstance(weight, nn.Parameter):
                part._parameters[leaf] = weight
            else:
                assert isinstance(part, Linear | Embedding)
                del part._parameters[leaf]
                part.stored = TrainedCodes(weight, part.stored.role, compute)
    return stored


def _made(numbers: Tensor, tensor: ParameterTensor, setup: TrainingSetup, name: str) -> nn.Parameter | QuantisedWeight:
    format_name, _ = stored_format(setup, tensor)
    if format_name in TORCH_DTYPES:
        return nn.Parameter(numbers.to(TORCH_DTYPES[format_name]))
    return _encoded(numbers, format_name, name)


def _encoded(numbers: Tensor, format_name: str, name: str) -> QuantisedWeight:
    if format_name not in WEIGHT_FORMATS:
        known = ", ".join((*TORCH_DTYPES, *WEIGHT_FORMATS))
        raise CannotAnswerError(f"{name}: weights in {format_name} cannot be trained here (can: {known})")
    if numbers.ndim != 2:
        raise CannotAnswerError(f"{name}: a stack of experts in {format_name} cannot be trained here")
    return QuantisedWeight.of(numbers, format_name)


def prepare(device: str, threads: int = 0) -> None:
    """Make sure that there is such a device, and take so many threads of the CPU; 0 leaves torch's choice.

    Raises:
        CannotAnswerError: torch sees no such device.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise CannotAnswerError("--device cuda: torch sees no CUDA device")
    if threads:
        torch.set_num_threads(threads)
