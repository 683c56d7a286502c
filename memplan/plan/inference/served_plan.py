"""The bytes of a model that answers several sequences at once, by component, against a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from memplan.catalog.entries import StorageFormat
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.families.layer_windows import layer_windows
from memplan.model.inventory import Role
from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention, ModelSpec
from memplan.plan.allowances import allowances_for, communicating, communicator_of
from memplan.plan.inference.served_ranks import served_shard
from memplan.plan.memory_plan import Device, Verdict, verdict_of
from memplan.step.model_on_tape import model_on_tape
from memplan.step.regimes import regime_of
from memplan.step.states.model_states import model_states
from memplan.step.states.optimizer_scratch import step_temporaries
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Pieces, quantities
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import round_up

SAMPLING_BYTES = 4
"""Bytes of a logit that is sampled from: the last position's logits are copied in fp32
(transformers/generation/utils.py, ``_sample``, v5.23.0)."""

LEAST_LARGE, LARGE_ROUND, SMALL_SEGMENT = 10 * 2**20, 2 * 2**20, 20 * 2**20
"""Tensors from which segments are their own, what those are rounded to, and the segment that smaller ones share."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is served."""

    context: int  # Tokens of each sequence, prompt and answer together
    concurrency: int  # Sequences at once
    key_value_bytes: int  # Bytes of one number in the cache
    prefill: int  # Tokens of prompts that one forward takes, all sequences together
    layout: Layout  # How the cache is kept


@dataclass(frozen=True, slots=True)
class Served:
    """What serving takes of a device."""

    request: Request
    components: Mapping[str, int]  # Component -> bytes, which add up to ``device_bytes``
    device_bytes: int
    upper_bytes: int  # Upper end of the interval
    usable_bytes: int
    verdict: Verdict
    layers: tuple[CachedLayer, ...]  # What each layer caches


class ServedModel:
    """A model in its formats on a device, whose requests are planned.

    Args:
        keys: Keys of its ``config.json``, for windows.
        setup: A setup of frozen weights in floats: which kernels run, and in what dtype.
        stored: Format of each role's weights.
        device: What it is served on; several GPUs share its matrices, and one of them is planned.

    Raises:
        InvalidFileError: So many GPUs do not share the model evenly.
        CannotAnswerError: How they do is not modelled.
    """

    def __init__(
        self,
        model: Model,
        keys: Mapping[str, Any],
        setup: TrainingSetup,
        stored: Mapping[Role, StorageFormat],
        device: Device,
    ) -> None:
        own = served_shard(model, device.count)
        self.model, self.keys, self.setup, self.device = own, keys, setup, replace(device, count=1)
        self.vocabulary, self.ranks = model.spec.vocab_size, device.count
        sizes = [(_stored_bytes(t.shape, stored[t.role], setup), t.count) for t in own.inventory]
        self.weight_bytes = sum(size * count for size, count in sizes)
        self.segment_bytes = sum(segment_rest(size) * count for size, count in sizes)
        coded = [t for t in own.inventory if stored[t.role].training != "float" and len(t.shape) > 1]
        sizes_decoded = [(stored[t.role].served, _elements(t.shape) * setup.compute_bytes) for t in coded]
        # An engine's kernels may multiply codes as they are; transformers decodes a matrix whatever its format.
        self.decoded_bytes: dict[Layout, int] = {
            "paged": max((size for served, size in sizes_decoded if served == "decoded"), default=0),
            "dynamic": max((size for _, size in sizes_decoded), default=0),
        }
        allowances = allowances_for(device.gpu, 1, setup.reserve_share, setup.hardware)
        groups = [communicator_of(device.gpu, self.ranks, setup.hardware)] if self.ranks > 1 else []
        self.allowances = communicating(allowances, 0, groups) if groups else allowances

    def plan(self, request: Request) -> Served:
        """Return what a request takes.

        Formula:
            ``weights + sum over layers of concurrency * tokens * (keys + values) * bytes + the fullest moment of one
            layer's forward without gradients over the tokens of a prefill + a decoded matrix + logits of one position``; on
            each of several GPUs its shares, the sum of their results, which is a tensor of its own, and its share of the logits

        Source:
            ``CudaCommunicator.all_reduce`` in vllm/distributed/device_communicators/cuda_communicator.py (0.10)
        """
        layers = cached_layers(self.model.spec, self.keys)
        cache = cache_bytes(layers, request)
        shares = self.model.spec.vocab_size if self.ranks > 1 else 0
        logits = self.vocabulary * (self.setup.compute_bytes + SAMPLING_BYTES) + shares * self.setup.compute_bytes
        logits *= request.concurrency
        forward = self._forward_bytes(request) + _grown_bytes(layers, request)
        decoded = self.decoded_bytes[request.layout]
        passing = forward + decoded + logits
        retained = self.weight_bytes + cache
        segments = self.segment_bytes + sum(2 * segment_rest(size) for size in layer_sizes(layers, request))
        allowances, least = self.allowances, retained + passing + self.allowances.library_bytes
        reserve = segments + passing * allowances.reserve_fraction // 1
        device = least + reserve + allowances.context_bytes
        upper = least + segments + SMALL_SEGMENT + passing * allowances.upper_reserve_fraction // 1
        upper += allowances.upper_context_bytes
        components = {
            "weights": self.weight_bytes,
            "kv_cache": cache,
            "activations": forward,
            "logits": logits,
            "temporaries": decoded,
            "library_workspaces": self.allowances.library_bytes,
            "allocator_reserve": reserve,
            "device_context": self.allowances.context_bytes,
        }
        usable = self.device.usable_bytes(0)
        return Served(request, components, device, upper, usable, verdict_of(device, upper, usable), layers)

    def largest(self, of: Callable[[int], Request], most: int) -> int:
        """Return the largest number for which the request fits at the upper end, 0 where none does."""
        low, high = 0, 1
        while high < most and self.plan(of(high)).verdict == "fits":
            low, high = high, high * 2
        high = min(high, most)
        if self.plan(of(high)).verdict == "fits":
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.plan(of(middle)).verdict == "fits" else (low, middle)
        return low

    def _forward_bytes(self, request: Request) -> int:
        """Return the fullest moment of one layer, what it is given included, while nothing is saved for backward."""
        tokens = min(request.prefill, request.concurrency * request.context)
        length = min(tokens, request.context)
        batch = -(-tokens // length)
        states = model_states(self.setup, self.model.inventory, ())
        regime = regime_of(self.model, self.setup, batch, length)
        temporaries = step_temporaries(self.setup, states.tensors)
        taped = model_on_tape(StepInputs(self.model.spec, self.setup, states, regime, 0, temporaries, 0))
        spec = self.model.spec
        values = quantities(batch, length, (spec.vocab_size, spec.hidden_size), Pieces(1))
        moments = (moment for section in taped.layers for moment in section.evaluated().forward)
        summed = (
            batch * length * spec.hidden_size * self.setup.compute_bytes if self.ranks > 1 else 0
        )  # see :data:`SUMMED`
        return summed + max(moment.form.total_bytes(values) for moment in moments)


def cache_bytes(layers: tuple[CachedLayer, ...], request: Request) -> int:
    """Return the bytes of all sequences' cached keys and values."""
    numbers = sum(
        (one.key_elements + one.value_elements) * one.tokens(request.context, request.layout) for one in layers
    )
    return request.concurrency * numbers * request.key_value_bytes


def layer_sizes(layers: tuple[CachedLayer, ...], request: Request) -> list[int]:
    """Return the bytes of the keys, or what is as large, that each layer keeps as one tensor."""
    each = [one.key_elements * one.tokens(request.context, request.layout) for one in layers]
    return [request.concurrency * elements * request.key_value_bytes for elements in each]


def segment_rest(size: int) -> int:
    """Return what a tensor leaves unused of a segment of its own.

    Source:
        kMinLargeAlloc and kRoundLarge of c10/core/AllocatorConfig.h (v2.13.0): one of 10 MiB and more has a segment
        rounded up to 2 MiB; smaller ones share segments.
    """
    return round_up(size, LARGE_ROUND) - size if size >= LEAST_LARGE else 0


def _grown_bytes(layers: tuple[CachedLayer, ...], request: Request) -> int:
    """Return what a cache that grows by concatenation holds twice: one layer's keys while the longer ones are written."""
    if request.layout == "paged":
        return 0
    largest = max(max(one.key_elements, one.value_elements) * one.tokens(request.context, "dynamic") for one in layers)
    return request.concurrency * largest * request.key_value_bytes


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _stored_bytes(shape: tuple[int, ...], stored: StorageFormat, setup: TrainingSetup) -> int:
    """Return the bytes of a tensor; vectors, and rows that do not divide into blocks, stay in the compute dtype."""
    elements = _elements(shape)
    if len(shape) == 1 or (stored.blocking == "row" and shape[-1] % stored.block_elements):
        return elements * FLOAT_BYTES[setup.config.compute_dtype]
    return stored.level_bytes(elements)


Layout = Literal["dynamic", "paged"]

PAGE_TOKENS = 16
"""Tokens of a block of a paged cache (``block_size`` of vllm/config/cache.py, CUDA's default)."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What one layer keeps."""

    key_elements: int  # Numbers of one token's keys; with latent attention of what is compressed
    value_elements: int  # Numbers of one token's values; with latent attention of the shared rotated keys
    window: int  # The tokens that its attention looks back on, itself included; 0 for all

    def tokens(self, context: int, layout: Layout) -> int:
        """Return how many tokens of a sequence it keeps.

        Formula:
            ``min(context, window - 1)`` as transformers' DynamicCache, which adds the token at hand when it attends;
            whole blocks of ``min(context, window)`` in a paged cache.

        Source:
            transformers/cache_utils.py, DynamicSlidingWindowLayer.update (v5.23.0)
        """
        if layout == "dynamic":
            return min(context, self.window - 1) if self.window else context
        return round_up(min(context, self.window or context), PAGE_TOKENS)


def cached_layers(spec: ModelSpec, keys: Mapping[str, Any]) -> tuple[CachedLayer, ...]:
    """Return what every layer of a model keeps.

    Args:
        keys: Keys of its ``config.json``, which state windows.

    Latent attention keeps what is compressed, and the rotated part of the keys that all heads share (transformers 4 kept
    the keys and values of every head).

    Raises:
        CannotAnswerError: Layers keep a state, or nothing, and not keys and values.

    Source:
        transformers/models/deepseek_v3/modeling_deepseek_v3.py (v5.23.0); https://arxiv.org/abs/2405.04434, 2.1.2
    """
    if spec.encoder is not None:
        raise CannotAnswerError(
            f"{spec.name} is an encoder, which generates nothing and keeps no keys and values: inference with it is not modelled"
        )
    recurrent = {
        "gated delta networks": spec.linear_attention,
        "state space layers": spec.state_space is not None,
        "short convolutions": spec.convolves,
    }
    for parts in [name for name, has in recurrent.items() if has]:
        raise CannotAnswerError(f"{spec.name}: what {parts} keep of a sequence in inference is not modelled")
    windows = layer_windows(keys, spec.num_hidden_layers)
    sizes = []
    for run in spec.runs:
        part = run.layer.attention
        if isinstance(part, LatentAttention):
            own = (part.kv_lora_rank, part.qk_rope_head_dim)
        else:
            assert isinstance(part, Attention)
            own = (part.key_value_size, part.key_value_size)
        sizes += [own] * run.count
    return tuple(CachedLayer(*size, window) for size, window in zip(sizes, windows, strict=True))
