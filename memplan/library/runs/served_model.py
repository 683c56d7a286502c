"""``memplan fit --method inference``: does serving this model fit, and how far does it go?"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import Stage
from memplan.catalog.entries import StorageFormat
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError, match_hint, printable
from memplan.library.answers.answer import Answer
from memplan.library.lookup import find_device
from memplan.library.lookup.model_lookup import released_keys
from memplan.model.inventory import ROLES, Role
from memplan.model.model import Model
from memplan.plan.inference.served_plan import Request, Served, ServedModel
from memplan.plan.memory_plan import Device
from memplan.report.document import Document
from memplan.step.kernels.card_support import on_card
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import FLOAT_BYTES

METHODS = ("pretrain", *(stage for stage in get_args(Stage) if stage != "grpo"), "inference")
"""Methods that are planned; all but the last are training steps, and the first is another name of the second."""

OTHER_METHODS = ("ppo",)
"""Methods that people name and that are not modelled."""

KEY_VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8-e4m3": 1, "fp8-e5m2": 1}
"""Dtypes of a cache. FP8 keeps one scale for a whole tensor of it, if any (vllm/config/cache.py, ``cache_dtype``)."""

PREFILL_TOKENS = 2048
"""Tokens that a serving engine's forward takes at most where nothing is said
(``DEFAULT_MAX_NUM_BATCHED_TOKENS`` of vllm/config/scheduler.py)."""

SMALLER = ("fp8-e4m3", "q4-0")
"""Formats of 8 and of 4 bits that engines serve, offered where a model does not fit."""

MOST_CONCURRENCY = 65_536
MOST_CONTEXT = 16_777_216

KEPT_IN_FLOATS: tuple[Role, ...] = ("embedding", "head", "norm", "bias", "router")
"""Roles whose weights stay in the compute dtype beside coded matrices, as bitsandbytes, GPTQ and AWQ leave them."""

KEPT_BY_LLAMA_CPP: tuple[Role, ...] = ("norm", "bias", "router")
LLAMA_CPP_HEAD = "q6-k"
"""llama.cpp codes embedding and head too, the head, or the table that stands for both, in Q6_K at least
(``llama_tensor_get_type`` of src/llama-quant.cpp)."""


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """What is served, and how."""

    context: int = 4096  # Tokens of each sequence, prompt and answer together
    concurrency: int = 1  # Sequences at once
    kv_dtype: str | None = None  # Dtype of cached keys and values; ``None`` for that of the computation
    # Weight format of the matrices; ``None`` for the released one where the catalog has it, or bf16.
    weights: str | None = None
    # ``transformers``: its ``generate`` with a growing cache; ``serving``: a paged cache and chunked prompts.
    engine: Literal["transformers", "serving"] = "serving"


@dataclass(frozen=True)
class Serving(Answer):
    """What serving a model takes of a GPU."""

    model: Model
    device: Device
    options: InferenceOptions
    weights: str  # Name of the format of its matrices
    kv_dtype: str
    served: Served
    planner: ServedModel
    notes: tuple[str, ...]  # What is taken for granted, one sentence each
    catalog: Catalog

    @property
    def verdict(self) -> str:
        """Whether it fits: ``fits``, ``tight`` or ``no``."""
        return self.served.verdict

    @cached_property
    def largest_context(self) -> int:
        """The longest context that fits at this concurrency, or 0."""
        limit = self.model.spec.max_position_embeddings or MOST_CONTEXT
        return self.planner.largest(
            lambda tokens: _request(replace(self.options, context=tokens), self.kv_dtype), limit
        )

    @cached_property
    def largest_concurrency(self) -> int:
        """How many sequences of this context fit at once, or 0."""
        return self.planner.largest(
            lambda count: _request(replace(self.options, concurrency=count), self.kv_dtype), MOST_CONCURRENCY
        )

    @cached_property
    def smaller(self) -> dict[str, Served]:
        """The same with its matrices in 8 and in 4 bits, where it does not fit as it is."""
        if self.verdict == "fits":
            return {}
        planner, request = self.planner, self.served.request
        others = {name: _stored(name, self.model, self.catalog) for name in SMALLER}
        plans = {
            name: ServedModel(self.model, planner.keys, planner.setup, stored, self.device).plan(request)
            for name, stored in others.items()
        }
        return {name: plan for name, plan in plans.items() if plan.device_bytes < self.served.device_bytes}

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer as tables, sentences and JSON."""
        from memplan.report.plans.inference_answer import ServedAnswer, inference_document

        requested = asdict(self.options) | {"weights": self.weights, "kv_dtype": self.kv_dtype}
        reach = self.largest_context, self.largest_concurrency
        shown = ServedAnswer(self.model, self.device, requested, self.served, *reach, self.notes, self.smaller)
        return inference_document(shown, self.catalog.hash if full else "", unit, strict=strict)


PROMPTS = (
    "prompts hold text alone: vision tower and projector are loaded and unused; images need more, for the tower's activations "
    "and in the cache for the tokens that they become"
)


def serve(
    model: Model, options: InferenceOptions, catalog: Catalog, gpu: str | None, gpu_memory: str | None, gpus: int = 1
) -> Serving:
    """Return whether a model can be served on a GPU, or on each of several that share its matrices.

    Raises:
        InvalidFileError: Numbers out of range, an unknown dtype, or a number of GPUs that does not divide the model.
        CannotAnswerError: No GPU is named or here, or the model's forward is not modelled.
    """
    _refuse(options)
    device = find_device(gpu, gpu_memory, gpus, catalog)
    if gpus > 1 and options.engine == "transformers":
        raise CannotAnswerError(
            "--engine transformers: generate over several GPUs is not modelled; a serving engine is"
        )
    weights, about = _weights(model, options, catalog)
    kv_dtype = options.kv_dtype or "bf16"
    config = TrainingConfig(description="serving", stack="transformers", weights={"default": "bf16"})
    setup = on_card(resolve(config, catalog, "inference"), model, device.gpu)
    stored = _stored(weights, model, catalog)
    keys, windows = _keys(model, catalog)
    planner = ServedModel(model, keys, setup, stored, device)
    served = planner.plan(_request(options, kv_dtype))
    tower = [PROMPTS] if model.spec.tower is not None else []
    notes = (*tower, *about, *windows, *_engine_notes(options, device), *setup.card_notes, *model.notes)
    return Serving(model, device, options, weights, kv_dtype, served, planner, notes, catalog)


def _refuse(options: InferenceOptions) -> None:
    problems = []
    for name, most in (("context", MOST_CONTEXT), ("concurrency", MOST_CONCURRENCY)):
        value = getattr(options, name)
        if not 1 <= value <= most:
            problems.append(f"--{name}: expected a whole number from 1 to {most:,}, got {value}")
    if options.kv_dtype is not None and options.kv_dtype not in KEY_VALUE_BYTES:
        known = f"; known: {', '.join(KEY_VALUE_BYTES)}"
        problems.append(
            f"--kv-dtype: unknown dtype {options.kv_dtype!r}{match_hint(options.kv_dtype, KEY_VALUE_BYTES, known)}"
        )
    if problems:
        raise InvalidFileError(problems)


def refuse_method(method: str, settings: Sequence[str] = ()) -> None:
    """Refuse a method that is not planned.

    Args:
        settings: What is set besides.

    Raises:
        CannotAnswerError: It is known, and not modelled.
        InvalidFileError: It is not known.
    """
    if method == "grpo":
        if any(setting.startswith("method.rollout") for setting in settings):
            return
        text = "say how much is generated, such as -b 8 --set method.rollout.completion_length=1024, or give TRL's file"
        raise InvalidFileError([f"method grpo: {text}"])
    if method in OTHER_METHODS:
        raise CannotAnswerError(
            f"method {method} is not modelled: its other models, log-probabilities or rollouts are in no plan yet; "
            f"planned are {', '.join(METHODS)}, and grpo from TRL's files"
        )
    if method not in METHODS:
        known = (*METHODS, "grpo", *OTHER_METHODS)
        hint = match_hint(method, known, f"; known: {', '.join(known)}")
        raise InvalidFileError([f"unknown method {printable(method)!r}{hint}"])


def _request(options: InferenceOptions, kv_dtype: str) -> Request:
    paged = options.engine == "serving"
    prefill = PREFILL_TOKENS if paged else options.concurrency * options.context
    prefill = max(prefill, options.concurrency)
    layout: Literal["dynamic", "paged"] = "paged" if paged else "dynamic"
    return Request(options.context, options.concurrency, KEY_VALUE_BYTES[kv_dtype], prefill, layout)


def _weights(model: Model, options: InferenceOptions, catalog: Catalog) -> tuple[str, tuple[str, ...]]:
    """Return the format of the matrices, and what is to be said of it."""
    if options.weights is not None:
        return options.weights, ()
    released = model.quantization
    if released is None:
        entry = catalog.models.entries.get(model.source.removeprefix("catalog:"))
        if entry is None or entry.released_weights is None:
            return "bf16", ()
        return entry.released_weights, (f"weights {entry.released_weights}, as released",)
    if released == "mxfp4" and model.has_experts:
        return "expert_matrix=mxfp4", ("weights expert_matrix=mxfp4, as released",)  # transformers' Mxfp4HfQuantizer
    if released in catalog.formats:
        return catalog.formats.name_of(released), (f"weights in {released}, as released",)
    raise CannotAnswerError(f"the model was released in {released}, whose layout memplan does not know: give --weights")


def _stored(weights: str, model: Model, catalog: Catalog) -> dict[Role, StorageFormat]:
    """Return the format of each role: of all matrices, or of roles by name as in ``expert_matrix=mxfp4``."""
    stored: dict[Role, StorageFormat] = dict.fromkeys(ROLES, catalog.formats["bf16"])
    for part in weights.split(","):
        given, _, name = part.rpartition("=")
        if given and given.strip() not in ROLES:
            raise InvalidFileError([f"--weights: unknown role {printable(given)!r}{match_hint(given, ROLES)}"])
        own = _format(name.strip(), catalog)
        if own.training == "coded" and own.ggml_type is None:
            raise CannotAnswerError(f"--weights: {own.title} is memplan.muon's own; no engine for inference reads it")
        if given:
            stored[cast("Role", given.strip())] = own
            continue
        if catalog.formats.name_of(name.strip()) in FLOAT_BYTES:
            floats: Sequence[Role] = ()
        else:
            floats = KEPT_IN_FLOATS if own.ggml_type is None else KEPT_BY_LLAMA_CPP
        stored |= {role: own for role in ROLES if role not in floats}
        if (
            own.ggml_type is not None
            and own.bytes_per_element < (head := catalog.formats[LLAMA_CPP_HEAD]).bytes_per_element
        ):
            stored["embedding" if model.spec.tie_word_embeddings else "head"] = head
    return stored


def _format(name: str, catalog: Catalog) -> StorageFormat:
    """Return a weight format; of the names of llama.cpp's mixtures and of bits alone, what there is instead."""
    if name not in catalog.formats:
        if _MIXTURE.fullmatch(name):
            nearest = catalog.formats.name_of(name.rpartition("_")[0])
            text = f"mixes formats: give the .gguf file itself as the model, or plan a little less with {nearest}"
            raise InvalidFileError([f"--weights: llama.cpp's {printable(name)} {text}"])
        if _FOUR_BITS.fullmatch(name):
            raise InvalidFileError([f"--weights: {printable(name)} may be {FOUR_BITS}: say which"])
    return catalog.formats[name]


_MIXTURE = re.compile(r"q[2-6]_k_[sml]|iq[1-4]_m", re.IGNORECASE)
_FOUR_BITS = re.compile(r"(?:int|w)?-?4(?:-?bits?)?|w4a16", re.IGNORECASE)
FOUR_BITS = "awq, gptq, nf4, q4-0 or mxfp4"


def _keys(model: Model, catalog: Catalog) -> tuple[dict[str, Any], tuple[str, ...]]:
    try:
        return dict(released_keys(model, catalog)), ()
    except CannotAnswerError:
        return {}, ("windows of attention are not known without a config.json: every layer caches the whole context",)


def _engine_notes(options: InferenceOptions, device: Device) -> tuple[str, ...]:
    if options.engine == "transformers":
        return (
            "transformers' generate: all prompts in one forward, a cache that grows by concatenation, logits of the last position",
        )
    shared = (
        f"tensor parallel {device.count}: heads, feed-forward parts, vocabulary and the cache are divided among {device.count} GPUs, "
        "of which one is planned; engines' own buffers of their sums are not counted"
    )
    return (
        *([shared] if device.count > 1 else []),
        f"a serving engine: cache in blocks of 16 tokens, prompts in chunks of {PREFILL_TOKENS:,} tokens; engines differ in "
        "CUDA graphs, in kernels that read coded weights as they are, and in prefix sharing",
        f"vLLM takes a share of {device.name}, gpu_memory_utilization (0.9 by default), whatever the cache needs: what is left "
        "of it besides weights and activations is cache",
    )
