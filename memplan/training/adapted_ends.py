"""What trains of a model's ends and norms beside adapters: adapters on embedding and head, and copies of modules trained whole."""

from collections.abc import Sequence
from dataclasses import replace

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.inventory import Inventory, ParameterTensor, Role
from memplan.model.model import Model
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import ModelSpec
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

SAVED_ROLES: tuple[Role, ...] = ("embedding", "head", "norm", "bias")
"""Roles of what can be trained whole as a copy of its module."""
VALUE_HEAD = "v_head.summary"
"""The head of values that TRL puts beside a model's own (trl/models/modeling_value_head.py, 0.24.0)."""
OWN_PRODUCTS = ("fused-head", "fused-divergence", "fused-linear", "cut-cross-entropy")
"""Losses that multiply by the head's weight themselves, and pass its adapter by."""


def last_part(name: str) -> str:
    """Return the last part of a module's name.

    Example:
        >>> last_part("model.embed_tokens")
        'embed_tokens'
    """
    return name.rpartition(".")[-1]


def module_of(tensor: ParameterTensor) -> str:
    """Return the name of the module that a parameter tensor belongs to."""
    return tensor.name.removesuffix(".weight").removesuffix(".bias")


def selects(targets: Sequence[str], module: str) -> bool:
    """Tell whether one of an adapter's targets is a module's name, or the end of it behind a dot.

    Example:
        >>> selects(["mlp.gate_proj"], "model.layers.{}.mlp.gate_proj"), selects(["proj"], "model.layers.{}.mlp.gate_proj")
        (True, False)

    Source:
        ``match_target_against_key`` and ``check_target_module_exists`` in peft/tuners/tuners_utils.py (0.21.2).
    """
    return f".{module}".endswith(tuple(f".{target}" for target in targets))


def is_saved(setup: TrainingSetup, tensor: ParameterTensor) -> bool:
    """Tell whether a tensor of the model is trained whole beside adapters, in a copy of its module.

    A module is meant whose name ends so, be it in the middle of a word: ``norm`` is every ``input_layernorm`` too.

    Source:
        ``_set_trainable`` in peft/utils/other.py (0.21.2).
    """
    adapter = setup.config.adapter
    if adapter is None or not (adapter.modules_to_save or setup.scores):
        return False
    if tensor.role not in SAVED_ROLES or not tensor.used:
        return False
    return module_of(tensor).endswith(adapter.modules_to_save) or (setup.scores and tensor.role == "head")


def with_saved_alone(own: Inventory, setup: TrainingSetup) -> Inventory:
    """Return tensors of which those of a copied module's roles that are not copied are marked as frozen."""
    roles = {tensor.role for tensor in own if is_saved(setup, tensor)}
    if not roles:
        return own
    return tuple(replace(t, frozen=True) if t.role in roles and not is_saved(setup, t) else t for t in own)


def originals(inventory: Inventory, setup: TrainingSetup) -> Inventory:
    """Return the tensors of modules that stay beside the copies that are trained; a tied table stays once, as any copy's.

    Source:
        ``ModulesToSaveWrapper.update`` in peft/utils/other.py (0.21.2): a deep copy, beside ``original_module``.
    """
    saved = [tensor for tensor in inventory if is_saved(setup, tensor)]
    if setup.untied_ends:
        tables = [tensor for tensor in saved if tensor.role in ("embedding", "head") and len(tensor.shape) > 1]
        saved.remove(tables[0])
    return tuple(replace(t, name=f"{module_of(t)}.original_module.{last_part(t.name)}") for t in saved)


def untied(model: Model, setup: TrainingSetup) -> Model:
    """Return a model whose head and embedding are tensors of their own, where a copy of either is trained in its place."""
    adapter, spec = setup.config.adapter, model.spec
    if adapter is None or not spec.tie_word_embeddings or not adapter.modules_to_save:
        return model
    if not any(name.endswith(adapter.modules_to_save) for name in (spec.names.embedding, spec.names.head)):
        return model
    spec = replace(spec, tie_word_embeddings=False)
    # A tower that images pass through says so in its tensors; runs of layers share their tensors' names.
    known = {(tensor.name, tensor.first): tensor for tensor in model.inventory}
    inventory = tuple(known.get((tensor.name, tensor.first), tensor) for tensor in inventory_of(spec))
    return replace(model, spec=spec, inventory=inventory)


def refuse_saved(model: Model, setup: TrainingSetup) -> None:
    """Refuse modules that are trained whole and that no copy is made of here.

    Raises:
        InvalidFileError: One is neither embedding, head nor norm.
        CannotAnswerError: The stack's adapters do not copy modules, or norms of other roles are copied than can be told apart.
    """
    assert setup.config.adapter is not None
    where, modules = "adapter.modules_to_save", setup.config.adapter.modules_to_save
    if modules and setup.stack.model_code != "transformers":
        raise CannotAnswerError(
            f"{setup.name}: {where}: {setup.stack.name} copies no modules; use a stack that runs PEFT"
        )
    names = [module_of(t) for t in model.inventory if t.role in ("embedding", "head", "norm") and t.used]
    names += [model.spec.names.head] * model.spec.tie_word_embeddings
    if wrong := [module for module in modules if not any(name.endswith(module) for name in names)]:
        texts = ", ".join(dict.fromkeys(map(last_part, names)))
        raise InvalidFileError([f"{where}: {name!r} is no embedding, head or norm; known: {texts}" for name in wrong])
    copied = {tensor.role for tensor in model.inventory if module_of(tensor).endswith(modules)} if modules else set()
    if copied - set(SAVED_ROLES):
        raise CannotAnswerError(
            f"{setup.name}: {where}: matrices of layers are not modelled; embedding, head and norms are"
        )
    if "norm" in copied and setup.config.adapter.kind == "dora":
        raise CannotAnswerError(f"{setup.name}: {where}: norms are not modelled beside dora's magnitudes; use lora")


def with_saved_cast(setup: TrainingSetup, model: Model) -> TrainingSetup:
    """Return a setup in which modules that are trained whole have the dtype of adapters, where the stack casts all that trains.

    Raises:
        CannotAnswerError: What becomes of copies that are cast so was not followed, or torch's loss scale takes no gradients of theirs.

    Source:
        ``_setup_lora_tuning`` in llamafactory/model/adapter.py (0.9.5).
    """
    if setup.config.adapter is None:
        return setup
    if setup.stack.saved_modules == "weights":
        _refuse_unscalable(setup, model)
        return setup
    wide = setup.adapter_dtype
    saved = {t.role for t in model.inventory if is_saved(setup, t) and setup.format_names[t.role] != wide}
    others = {t.role for t in model.inventory if t.used and not is_saved(setup, t)}
    parallel, unlike = setup.config.parallel, ""
    if saved & others:
        unlike = "of all norms or none"
    elif saved and setup.config.method.stage != "sft":
        unlike = "for sft"
    elif saved and (parallel.zero_stage or parallel.engine != "torch"):
        unlike = "of one GPU, and of replicas"
    elif saved and not setup.autocast and wide != setup.config.compute_dtype:
        unlike = "under mixed precision, without which torch refuses two dtypes"
    if unlike:
        text = f"{setup.stack.label} casts copies to {wide}, which is modelled {unlike}"
        raise CannotAnswerError(f"{setup.name}: adapter.modules_to_save: {text}")
    return setup.with_floats(dict.fromkeys(saved, wide))


def _refuse_unscalable(setup: TrainingSetup, model: Model) -> None:
    """Raise where copies, or a head of scores, are in fp16 as the weights are, since torch's loss scale takes no gradients in fp16.

    Beside codes TRL casts all that trains to bf16.
    """
    # Source: ``_unscale_grads_`` in torch/amp/grad_scaler.py (v2.13.0); seen with transformers 5.24 and TRL 1.16
    # (tests/survey/stacks). Line 911 of trl/trainer/sft_trainer.py (1.16.0).
    config = setup.config
    if not (config.loss_scaling and setup.autocast and config.master_weights == "none" and config.adapter):
        return
    cast = setup.format_names["hidden_matrix"] not in FLOAT_BYTES and setup.stack.adapter_dtype_quantised == "bf16"
    copies = [
        t for t in model.inventory if module_of(t).endswith(config.adapter.modules_to_save) and is_saved(setup, t)
    ]
    whole = {tensor.role: "adapter.modules_to_save" for tensor in copies}
    whole |= {"head": "method.stage"} if setup.scores else {}
    if key := next((key for role, key in whole.items() if setup.format_names[role] == "fp16" and not cast), ""):
        raise CannotAnswerError(
            f"{setup.name}: {key}: torch's GradScaler ends a step with what trains whole in fp16 by 'Attempting to "
            "unscale FP16 gradients'; use weights: fp32, which autocast computes in fp16, or compute_dtype: bf16"
        )


def targeted_ends(model: Model, setup: TrainingSetup) -> Sequence[str]:
    """Return which of embedding and head adapters are put on, by the last part of their names.

    Raises:
        CannotAnswerError: No library's code was followed so.
    """
    assert setup.config.adapter is not None
    adapter, names = setup.config.adapter, model.spec.names
    table, head = last_part(names.embedding), last_part(names.head)
    ends = [last_part(name) for name in (names.embedding, names.head) if selects(adapter.targets, name)]
    if not ends:
        return ends
    where, code, loss = f"{setup.name}: adapter.targets: adapters on", setup.stack.model_code, setup.profile.loss
    if setup.config.parallel != Parallel():
        raise CannotAnswerError(f"{where} {ends[0]} are not modelled on several GPUs; use adapter.modules_to_save")
    if code not in ("transformers", "torchtune") or (code == "torchtune" and ends != [head]):
        raise CannotAnswerError(f"{where} {ends[0]} are not modelled of stack {setup.stack.name}; leave it out")
    if table in ends and adapter.kind == "dora":
        raise CannotAnswerError(f"{where} the embedding, {table}, are not modelled by dora; use lora")
    if head not in ends:
        return ends
    if setup.scores or setup.has_value_head or (code == "torchtune" and model.spec.tie_word_embeddings):
        raise CannotAnswerError(
            f"{where} the head, {head}, are not modelled where it is tied to the embedding, or yields a score, or has "
            "one of values beside it"
        )
    if loss in OWN_PRODUCTS:
        raise CannotAnswerError(
            f"{where} the head, {head}, are never trained with kernels.loss: {loss}, which multiplies by the head's own "
            f"weight; use adapter.modules_to_save={head}"
        )
    if code == "torchtune" and adapter.kind == "dora" and loss != "fp32":
        raise CannotAnswerError(f"{where} {head} are not modelled by dora with kernels.loss: {loss}; use fp32")
    return ends


def headless(spec: ModelSpec) -> ModelSpec:
    """Return the shapes of a model without a head (``AutoModel``), of which a tied one has no tensor either."""
    return replace(spec, tie_word_embeddings=True, head_bias=False, final_logit_softcap=0.0, logit_scale=0.0)
