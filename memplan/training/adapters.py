"""The parameter tensors that adapters add to a model."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from memplan.catalog.training_config import Adapter
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.families import around
from memplan.model.inventory import Inventory, ParameterTensor, Role
from memplan.model.model import Model
from memplan.model.spec import Attention, MixtureOfExperts, Mlp, ModelSpec, TensorNames
from memplan.model.tower import Tower
from memplan.training.adapted_ends import VALUE_HEAD, last_part, module_of, refuse_saved, selects, targeted_ends
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

RENAMED = ("gate_proj", "up_proj", "down_proj")
"""Targets that PEFT turns into names of stacked parameters: linear layers called so, of shared experts and of dense layers, have no
adapters then (``convert_peft_config_for_transformers`` in peft/utils/transformers_weight_conversion.py, 0.21.2)."""

OWN_TARGETS = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral"), ("q_proj", "v_proj")),
    **dict.fromkeys(("qwen2", "qwen3", "stablelm"), ("q_proj", "v_proj")),
    **dict.fromkeys(("falcon", "gpt_neox"), ("query_key_value",)),
    "gpt2": ("c_attn",),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
"""Families -> the modules that adapters are put on where none are said; PEFT has no list for others, and stops.

Source:
    ``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`` in peft/utils/constants.py (0.21.2).
"""

TOWER_PARTS = (
    "model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision.", "model.embed_audio.",
    "model.image_newline", "model.vision_model.", "model.connector.",
)  # fmt: skip
"""What the names of the parameters of a vision tower and its projector begin with."""
LAST_PARTS = ("model.embed_vision.", "model.embed_audio.")
"""What those of them begin with the last of which a model's parameters end with, but for a head of its own (Gemma 4)."""

REFERENCE = "reference."
"""What the names of a reference model's parameters begin with."""


def adapter_tensors(model: Model, setup: TrainingSetup) -> tuple[ParameterTensor, ...]:
    """Return the matrices that adapters add to a model: (rank, in) and (out, rank) for each target.

    Raises:
        InvalidFileError: A target of the config is no projection of the model.
        CannotAnswerError: Adapters are put on ends so that no library's code was followed, or modules are trained whole that
            no copy is made of here.
    """
    adapter = setup.config.adapter
    beside = _value_head(model.spec) if setup.has_value_head else ()
    if adapter is None:
        return beside
    refuse_saved(model, setup)
    if setup.stack.model_code == "litgpt":
        return tuple(_litgpt_tensors(model, setup, litgpt_parts(model.spec, adapter.targets)))
    ends = targeted_ends(model, setup)
    if ends and adapts_experts(model, setup):
        raise CannotAnswerError(
            f"{setup.name}: adapter.targets: all-linear, which puts adapters on stacked experts, is not modelled with {ends[0]}; "
            "name the projections"
        )
    if wrong := _unknown_targets(model, setup, ends):
        texts = ", ".join(projections(model))
        raise InvalidFileError(
            [f"adapter.targets: {name!r} is no projection of {model.spec.name}; known: {texts}" for name in wrong]
        )
    tensors: list[ParameterTensor] = []
    renamed = RENAMED if adapted_experts(model, setup) == "named" else ()
    for tensor in libraries_inventory(model.inventory, setup):
        if not is_adapted(tensor, adapter, model.spec.tower) or _projection(tensor) in renamed:
            continue
        rows, columns = tensor.shape[::-1] if model.spec.transposed_linear else tensor.shape
        tensors += _factors(tensor, adapter, rows, columns)
    return (*tensors, *_adapters_of_ends(model, setup, ends), *_adapters_of_parameters(model, setup), *beside)


def _value_head(spec: ModelSpec) -> tuple[ParameterTensor, ...]:
    """Return the parameters of a head of values, which trains beside adapters and without any."""
    weight = ParameterTensor(f"{VALUE_HEAD}.weight", (1, spec.hidden_size), "head")
    return weight, ParameterTensor(f"{VALUE_HEAD}.bias", (1,), "bias")


def _unknown_targets(model: Model, setup: TrainingSetup, ends: Sequence[str]) -> list[str]:
    """Return the targets that select no module of a model; its other libraries know last parts of names alone."""
    modules = [module_of(tensor) for tensor in model.inventory if tensor.role == "hidden_matrix"]
    modules += [name for name in (model.spec.names.embedding, model.spec.names.head) if last_part(name) in ends]
    if setup.stack.model_code != "transformers":
        modules = [last_part(name) for name in modules]
    assert setup.config.adapter is not None
    stacked = {"gate", *RENAMED} if adapted_experts(model, setup) == "named" else set()
    targets = [target for target in setup.config.adapter.targets if target != "all-linear" and target not in stacked]
    return [target for target in targets if not any(selects((target,), name) for name in modules)]


def _factors(tensor: ParameterTensor, adapter: Adapter, rows: int, columns: int) -> Iterator[ParameterTensor]:
    """Yield the matrices of an adapter on a linear layer of so many rows and columns, and DoRA's magnitudes of its rows."""
    parts: dict[str, tuple[int, ...]] = {"lora_A": (adapter.rank, columns), "lora_B": (rows, adapter.rank)}
    if adapter.kind == "dora":
        parts["lora_magnitude_vector"] = (rows,)
    stem = tensor.name.removesuffix(".weight")
    for part, shape in parts.items():
        yield replace(tensor, name=f"{stem}.{part}.weight", shape=shape, frozen=False)


def _adapters_of_ends(model: Model, setup: TrainingSetup, ends: Sequence[str]) -> Iterator[ParameterTensor]:
    """Yield the matrices of adapters on embedding and head; those of a tied head are its own."""
    # Source: ``Embedding.update_layer`` in peft/tuners/lora/layer.py (0.21.2).
    spec, adapter = model.spec, setup.config.adapter
    assert adapter is not None
    table = ParameterTensor(spec.names.embedding, (spec.vocab_size, spec.hidden_size), "hidden_matrix")
    if last_part(spec.names.embedding) in ends:
        parts = {"A": (adapter.rank, spec.vocab_size), "B": (spec.hidden_size, adapter.rank)}
        for part, shape in parts.items():
            yield replace(table, name=f"{table.name}.lora_embedding_{part}.weight", shape=shape)
    if last_part(spec.names.head) in ends:
        head = replace(table, name=f"{spec.names.head}.weight", role="head")
        yield from _factors(head, adapter, spec.vocab_size, spec.hidden_size)


LITGPT_PARTS = ("query", "key", "value", "projection", "mlp", "head")
"""What LitGPT puts adapters on, each by a flag of its own (``lora_query`` and so on)."""


def litgpt_parts(spec: ModelSpec, targets: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of LitGPT's model that targets name, by its own words or by the names of a family's projections.

    Raises:
        InvalidFileError: One is neither, or is a projection that LitGPT adapts only together with others.
    """
    names, mlp = spec.names, spec.runs[0].layer.feed_forward
    parts: dict[str, tuple[str, ...]] = {part: (part,) for part in LITGPT_PARTS}
    parts |= {names.query: ("query",), names.key: ("key",), names.value: ("value",), names.head: ("head",)}
    parts |= {names.qkv: ("query", "key", "value"), names.output: ("projection",)}
    parts["all-linear"] = ("query", "key", "value", "projection", "mlp")
    inner = _mlp_names(names, mlp)
    wrong = [
        f"adapter.targets: {t!r} is no part of {spec.name}; known: {', '.join(parts)}"
        for t in targets
        if t not in (*parts, *inner)
    ]
    if not wrong and 0 < len(missing := [name for name in inner if name not in targets]) < len(inner):
        wrong = [f"adapter.targets: litgpt adapts a feed-forward part whole; add {', '.join(missing)}, or say mlp"]
    if wrong:
        raise InvalidFileError(wrong)
    chosen = {part for target in targets for part in parts.get(target, ("mlp",))}
    return tuple(part for part in LITGPT_PARTS if part in chosen)


def _litgpt_tensors(model: Model, setup: TrainingSetup, parts: Sequence[str]) -> Iterator[ParameterTensor]:
    """Yield the matrices that LitGPT adds: one pair for query, key and value together, with a rank for each of these."""
    # Source: ``LoRALinear`` and ``LoRAQKVLinear`` in litgpt/lora.py (0.5.13).
    assert setup.config.adapter is not None
    names, rank = model.spec.names, setup.config.adapter.rank
    kinds = {names.output: "projection", names.head: "head"}
    for tensor in model.inventory:
        if tensor.role not in ("hidden_matrix", "head"):
            continue
        stem, (rows, columns), count = tensor.name.removesuffix(".weight"), tensor.shape, 1
        if _projection(tensor) == names.qkv:
            heads = model.spec.runs[0].layer.attention
            assert isinstance(heads, Attention)
            sizes = {"query": heads.query_size, "key": heads.key_value_size, "value": heads.key_value_size}
            chosen = [sizes[part] for part in sizes if part in parts]
            rows, count = sum(chosen), len(chosen)
        elif kinds.get(_projection(tensor), "mlp") not in parts:
            continue
        for part, shape in (("lora_A", (rank * count, columns)), ("lora_B", (rows, rank))) if count else ():
            yield ParameterTensor(f"{stem}.{part}.weight", shape, "hidden_matrix", tensor.count, tensor.first)


def _mlp_names(names: TensorNames, mlp: Mlp | MixtureOfExperts | None) -> tuple[str, ...]:
    """Return the names of a feed-forward part's projections."""
    if isinstance(mlp, Mlp) and mlp.gated:
        return (names.gate_up, names.down) if mlp.fused_gate_up else (names.gate, names.up, names.down)
    return (names.up, names.down)


def adapts_experts(model: Model, setup: TrainingSetup) -> frozenset[str]:
    """Return which of a mixture's stacked parameters, its router's among them, PEFT puts adapters on."""
    adapter, said = setup.config.adapter, adapted_experts(model, setup)
    if adapter is None or said in ("", "left"):
        return frozenset()
    listed, targets = setup.stack.models.linear == "listed", set(adapter.targets)
    if "all-linear" in targets and not listed:
        return frozenset(("router", "gate_up_proj", "down_proj"))
    if said != "named":
        return frozenset()
    if "all-linear" in targets:
        inventory = libraries_inventory(model.inventory, setup)
        targets |= {_projection(tensor) for tensor in inventory if tensor.role == "hidden_matrix"}
    parts = {"router": "gate" in targets, "gate_up_proj": "gate_proj" in targets, "down_proj": "down_proj" in targets}
    return frozenset([name for name, adapted in parts.items() if adapted])


def adapted_experts(model: Model, setup: TrainingSetup) -> str:
    """Return what becomes of stacked experts under adapters on projections of their names; empty where there are none.

    Source:
        ``_convert_peft_config_moe`` in peft/utils/transformers_weight_conversion.py, ``ParamWrapper`` in
        peft/tuners/lora/layer.py (0.21.2).
    """
    stacked = setup.stack.model_code == "transformers" and setup.stack.models.experts == "released"
    return around(model.spec.architecture).adapted_experts if stacked else ""


def _adapters_of_parameters(model: Model, setup: TrainingSetup) -> Iterator[ParameterTensor]:
    """Yield the matrices that adapters add to parameters which are no linear layers: a rank for each expert, two where gate and up are one."""
    adapter = setup.config.adapter
    parts = adapts_experts(model, setup)
    if adapter is None or not parts:
        return
    for tensor in libraries_inventory(model.inventory, setup):
        part = "router" if tensor.role == "router" else last_part(tensor.name)
        if tensor.role not in ("expert_matrix", "router") or part not in parts:
            continue
        stem, (*experts, rows, columns) = tensor.name.removesuffix(".weight"), tensor.shape
        ranks = adapter.rank * prod(experts) * (2 if stem.endswith("gate_up_proj") else 1)
        for part, shape in (("lora_A", (ranks, columns)), ("lora_B", (rows, ranks))):
            yield ParameterTensor(f"{stem}.{part}.weight", shape, "hidden_matrix", tensor.count, tensor.first)


def replaced_table(inventory: Inventory, setup: TrainingSetup) -> Inventory:
    """Return the embedding that a ``StableEmbedding`` has taken the place of."""
    first = stable_names(inventory)[0] if setup.stable_embedding else None
    return tuple(
        replace(t, name=f"{t.name.removesuffix('.weight')}.original_module.weight")
        for t in inventory
        if t.name == first
    )


def stable_names(inventory: Inventory) -> tuple[str, ...]:
    """Return the names of a ``StableEmbedding``'s parameters: of its table, and of the norm behind it.

    Source:
        ``StableEmbedding`` in bitsandbytes/nn/modules.py (0.49.2); lines 220 to 229 of litgpt/finetune/lora.py (0.5.13).
    """
    table = next(tensor.name for tensor in inventory if tensor.role == "embedding")
    return (table, *(f"{table.removesuffix('weight')}norm.{part}" for part in ("weight", "bias")))


def reference_tensors(inventory: Inventory, setup: TrainingSetup) -> Inventory:
    """Return the tensors of a reference model that is a frozen second copy."""
    if setup.config.method.reference_model != "resident":
        return ()
    return tuple(replace(tensor, name=f"{REFERENCE}{tensor.name}", frozen=True) for tensor in inventory)


def libraries_inventory(inventory: Inventory, setup: TrainingSetup) -> Inventory:
    """Return a model's tensors in the roles that the stack's libraries see, which quantise and adapt modules by class.

    The gate of shared experts is a linear layer like others to PEFT and bitsandbytes. Biases of what is not quantised go
    with the norms where embedding, head and norms are cast to fp32, but that of a head which is cast back; a quantised projection casts its own to the compute
    dtype, and keeps it so (``Linear4bit.forward``, bitsandbytes 0.50.2): one that no row passes through never does.
    """
    if setup.stack.kbit_floats == "fp32-but-ends":
        linear = {t.name.removesuffix(".weight") for t in inventory if t.role == "hidden_matrix"}
        parallel = setup.config.parallel
        as_loaded = parallel.gpus > 1 and parallel.zero_stage == 3 and parallel.engine != "deepspeed"
        inventory = tuple(_cast_by_name(tensor, linear, "bias" if as_loaded else "router") for tensor in inventory)
    if (
        setup.stack.kbit_floats == "fp32-norms"
    ):  # what of a tower is an embedding has none of the names that are cast back
        inventory = tuple(replace(t, role="norm") if t.role == "embedding" and not t.used else t for t in inventory)
    if not setup.stack.own_models and setup.format_names["hidden_matrix"] not in FLOAT_BYTES:
        inventory = _marked_floats(inventory, setup)
    if setup.config.adapter is None or setup.stack.own_models:
        return inventory
    if setup.stable_embedding:
        used = tuple(tensor for tensor in inventory if tensor.used)
        table, *rest = used
        table = replace(table, name=table.name or "embedding.weight")  # merged tensors have no names
        norm = [ParameterTensor(name, table.shape[1:], "norm") for name in stable_names((table,))[1:]]
        return (*(tensor for tensor in inventory if not tensor.used), table, *norm, *rest)
    cast = setup.kbit_floats
    stems = {t.name.removesuffix(".weight"): t.role for t in inventory if t.role in ("norm", "head")} if cast else {}
    roles = [(tensor, _role_beside_codes(tensor, stems, setup)) for tensor in inventory]
    return tuple([tensor if role == tensor.role else replace(tensor, role=role) for tensor, role in roles])


def _marked_floats(inventory: Inventory, setup: TrainingSetup) -> Inventory:
    """Return tensors with those marked that stay floats beside codes: towers, what a model without a head ends with, and parts of attention.

    Source:
        ``get_modules_to_not_convert`` in swift/arguments/base_args/quant_args.py (ms-swift 4.6.0); of transformers 5.24.0
        ``get_keys_to_not_convert`` in quantizers/base.py, which leaves the module of the last parameter, and
        ``replace_with_bnb_linear`` in integrations/bitsandbytes.py, which leaves classes derived from ``nn.Linear``: the
        ``out_proj`` of torch's ``MultiheadAttention``.
    """
    parts = TOWER_PARTS if (whole := not setup.stack.quantised_towers) else LAST_PARTS
    left = [t.name for t in inventory if t.role == "hidden_matrix" and t.name.startswith(parts)]
    left = left if whole else [] if any(t.role == "head" for t in inventory) else left[-1:]
    stems = [t.name.removesuffix("in_proj_weight") for t in inventory if t.name.endswith("in_proj_weight")]
    left += [f"{stem}out_proj.weight" for stem in stems]
    return tuple([replace(t, stays_float=True) if t.name in left else t for t in inventory]) if left else inventory


def _role_beside_codes(tensor: ParameterTensor, stems: Mapping[str, Role], setup: TrainingSetup) -> Role:
    """Return a tensor's role, given those of norms and heads by module where they are cast beside codes."""
    stem = stems.get(tensor.name.removesuffix(".bias"))
    if tensor.role == "bias" and (stem or (stems and not tensor.used)):
        # whole modules are cast back: peft_module_casting_to_bf16 in trl/experimental/utils.py (1.16.0)
        return "head" if stem == "head" and setup.stack.kbit_floats == "fp32-norms" else "norm"
    return "hidden_matrix" if tensor.role == "router" and tensor.used and tensor.shape[0] == 1 else tensor.role


def _cast_by_name(tensor: ParameterTensor, linear: Container[str], rest: Role) -> ParameterTensor:
    """Return a tensor of a vision tower in the role of what is cast with it: modules that ``norm`` is in the name of, biases and all.

    Biases of ``linear`` layers that images pass through go with these, which cast them for good. Others are in the role of
    the ``rest``, which no forward casts either: what torch shards stays as it was loaded.
    """
    # Source: ``_convert_embedding_modules_dtype`` in axolotl/loaders/model.py (0.21.0).
    if not tensor.name.startswith(TOWER_PARTS) or tensor.role == "hidden_matrix":
        return tensor
    if tensor.used and tensor.role == "bias" and tensor.name.removesuffix(".bias") in linear:
        return tensor
    return replace(tensor, role="norm" if "norm" in tensor.name else rest)


def projections(model: Model) -> list[str]:
    """Return the names of a model's projections, such as ``q_proj``: what adapters can be put on."""
    return sorted({_projection(tensor) for tensor in model.inventory if tensor.role == "hidden_matrix"})


def is_adapted(tensor: ParameterTensor, adapter: Adapter, tower: Tower | None) -> bool:
    """Tell whether adapters go on a tensor: a projection that is targeted, and of no part of a tower that is left out."""
    if tensor.role != "hidden_matrix" or not is_targeted(tensor, adapter.targets):
        return False
    if tower is None or tensor.name not in {part.name for part in tower.tensors}:
        return True
    part = "projector" if tensor.name.startswith(tower.projector) else "tower"
    return adapter.vision in (True, part)


def is_targeted(tensor: ParameterTensor, targets: Sequence[str]) -> bool:
    """Tell whether adapters that are put on these targets go on a projection."""
    return "all-linear" in targets or selects(targets, module_of(tensor))


def _projection(tensor: ParameterTensor) -> str:
    """Return the last part of a projection's name, such as ``q_proj``."""
    return last_part(module_of(tensor))
