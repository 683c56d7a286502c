"""Jobs that no tape describes, refused before one is made."""

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.model.spec import MixtureOfExperts
from memplan.step.states.parallel_shards import gathered_setup, is_partitioned, is_sharded, shards_codes
from memplan.training.adapters import adapted_experts, adapts_experts
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import format_bytes


def refuse_unmodelled(model: Model, setup: TrainingSetup) -> None:
    """Raise for a job that is not modelled.

    Args:
        model: The model as a rank has it.

    Raises:
        CannotAnswerError: A part of the model, or of how it is trained, whose memory is not modelled.
    """
    _refuse_other_words(model, setup)
    _refuse_wide_tables(model, setup)
    _refuse_adapted_experts(model, setup)
    _refuse_transposed_copies(model, setup)
    _refuse_fused_adapters(gathered_setup(setup) if is_sharded(setup.config.parallel) else setup)
    _refuse_clipped_projections(model, setup)
    _refuse_sharded_mixtures(model, setup)
    _refuse_hooked_routers(model, setup)
    if setup.generates:
        from memplan.step.generated_completions import refuse_generation

        refuse_generation(model.spec, setup)
    if setup.config.compile != "none" or model.spec.beside:
        from memplan.step.compiled.compiled_model import refuse_compiled

        refuse_compiled(model.spec, setup)


def _refuse_other_words(model: Model, setup: TrainingSetup) -> None:
    """Raise for a teacher of another vocabulary than the student's, whose logits nothing compares, or one that a tower is before.

    Source:
        ``GKDTrainer.__init__`` in trl/experimental/gkd/gkd_trainer.py (1.16.0), which compares ``vocab_size``.
    """
    if setup.teacher is None:
        return
    own, other = model.spec, setup.teacher.model.spec
    if own.vocab_size != other.vocab_size:
        raise CannotAnswerError(
            f"method.teacher.model: {other.name} has a vocabulary of {other.vocab_size:,} and {own.name} one of {own.vocab_size:,}; "
            f"{setup.stack.label} compares logits of one vocabulary alone; name a teacher with the student's"
        )
    if setup.config.images.per_row:
        raise CannotAnswerError("method.stage: distillation is not modelled with images; use images.per_row: 0")


def _refuse_hooked_routers(model: Model, setup: TrainingSetup) -> None:
    """Raise for a loss of unbalanced experts whose tensors hooks copy into host memory beside those of cross-entropy."""
    hooked = setup.config.offload.activations == "cpu" and setup.stack.checkpointing.offloads == "hooks-once"
    if (
        hooked
        and setup.balances
        and any(isinstance(run.layer.feed_forward, MixtureOfExperts) for run in model.spec.runs)
    ):
        raise CannotAnswerError(
            f"{setup.name}: offload.activations: cpu is not supported beside a loss of unbalanced experts, whose tensors are copied too; "
            "method.balances: false has none"
        )


def _refuse_wide_tables(model: Model, setup: TrainingSetup) -> None:
    """Raise for an embedding or head in floats wider than products are computed in.

    Such an embedding makes the whole residual stream as wide; plain torch refuses the products then.
    Autocast, which all weights in fp32 mean, is another matter.
    """
    roles = {tensor.role for tensor in model.inventory} & {"embedding", "head"}
    for role in () if setup.autocast or setup.kbit_floats else sorted(roles):
        name = setup.format_names[role]
        if FLOAT_BYTES.get(name, 0) > setup.compute_bytes:
            raise CannotAnswerError(
                f"{setup.name}: weights.{role} in {name} beside products in {setup.config.compute_dtype} is not modelled; "
                f"use {setup.config.compute_dtype}, or fp32 for all weights, which is autocast"
            )


EXPERT_PROJECTIONS = frozenset(("all-linear", "gate_proj", "up_proj", "down_proj"))
"""Targets of adapters that stacked experts have too."""


def _refuse_adapted_experts(model: Model, setup: TrainingSetup) -> None:
    """Raise for adapters that a library puts on stacked experts, where no tape has them or PEFT itself refuses."""
    adapter, experts = setup.config.adapter, adapted_experts(model, setup)
    every = any(getattr(run.layer.feed_forward, "every_expert", False) for run in model.spec.runs)
    if adapter is not None and every and "all-linear" in adapter.targets:
        raise CannotAnswerError(
            f"{setup.name}: adapter.targets: all-linear puts an adapter on the router of {model.spec.name}, which returns two tensors, and "
            "PEFT stops with \"'tuple' object has no attribute 'dtype'\" (Linear.forward in peft/tuners/lora/layer.py, 0.21.2); name "
            "the projections, such as q_proj"
        )
    if adapter is None or experts in ("", "left") or EXPERT_PROJECTIONS.isdisjoint(adapter.targets):
        return
    what, last = (
        f"{setup.stack.name} puts adapters on the stacked experts of {model.spec.name}",
        "which is not modelled",
    )
    halves = {"gate_proj", "up_proj"} & set(adapter.targets)
    if len(halves) == 1 and experts == "named":
        last = f"of which it adapts gate and up together or none, and stops at {min(halves)} alone"
    elif not (parts := adapts_experts(model, setup)) and "all-linear" in adapter.targets:
        return  # of linear layers that a library lists, of which experts are none
    elif parts:
        if adapter.kind != "dora" and not adapter.dropout:
            return
        last = f"which PEFT refuses with {'dropout' if adapter.dropout else adapter.kind}"
    raise CannotAnswerError(
        f"{setup.name}: adapter.targets: {what}, {last}; target projections of attention, such as q_proj"
    )


def _refuse_transposed_copies(model: Model, setup: TrainingSetup) -> None:
    """Raise for DoRA with dropout over weights that are stored transposed: each forward makes parameters of them, which get gradients.

    Source:
        ``DoraLinearLayer.forward`` in peft/tuners/lora/dora.py and ``transpose`` in peft/utils/other.py (0.21.2).
    """
    adapter = setup.config.adapter
    peft = setup.stack.model_code == "transformers" and setup.format_names["hidden_matrix"] in FLOAT_BYTES
    if adapter is not None and adapter.kind == "dora" and adapter.dropout and model.spec.transposed_linear and peft:
        raise CannotAnswerError(
            f"{setup.name}: adapter.dropout: with DoRA, PEFT makes new parameters of the weights of {model.spec.name} in each "
            "forward, and gradients of them, which is not modelled; use adapter.dropout: 0, or adapter.kind: lora"
        )


def _refuse_fused_adapters(setup: TrainingSetup) -> None:
    """Raise for adapters fused with projections beyond what the tape has of them.

    Functions read weights without calling their modules, whose hooks ZeRO 3 gathers by: it gathers each as it is read, and keeps it longer.
    """
    # Source: ``get_lora_parameters`` in axolotl/kernels/lora.py (0.21.0); ``ZeROOrderedDict`` in
    # deepspeed/runtime/zero/parameter_offload.py (0.19.8).
    adapter = setup.config.adapter
    if adapter is None or not setup.profile.fused_adapters:
        return
    if is_partitioned(setup.config.parallel):
        own = setup.stack.values["kernels.adapters"]["composite"]
        keys = ", ".join(f"{key}: {value}" for key, value in own.items())
        raise CannotAnswerError(
            f"{setup.name}: kernels.adapters: fused under DeepSpeed's stage 3, which keeps what {setup.stack.name}'s functions read "
            f"gathered for longer, is not modelled; use composite, there {keys}"
        )
    if adapter.kind == "dora" or setup.residual_bytes != setup.compute_bytes:
        what = "dora" if adapter.kind == "dora" else "a residual stream in fp32 beside products in 16 bits"
        raise CannotAnswerError(
            f"{setup.name}: kernels.adapters: fused with {what}, as {setup.stack.name} runs it, is not modelled; use composite"
        )


def _refuse_sharded_mixtures(model: Model, setup: TrainingSetup) -> None:
    """Raise for mixtures of experts whose other matrices are codes that are sharded, beside routers in fp32."""
    coded = shards_codes(setup) and setup.format_names["hidden_matrix"] not in FLOAT_BYTES
    mixture = any(run.layer.mixture is not None for run in model.spec.runs)
    if coded and mixture and is_sharded(setup.config.parallel):
        raise CannotAnswerError(
            f"{setup.name}: weights: {setup.format_names['hidden_matrix']} of a mixture of experts, sharded as "
            f"{setup.stack.name} does, is not modelled; use parallel.zero_stage: 0, with data parallelism alone"
        )


def _refuse_clipped_projections(model: Model, setup: TrainingSetup) -> None:
    """Raise for selective checkpointing that keeps products which a model then clips in place: torch stops there.

    What an adapter adds to is no product that is kept.
    """
    # Source: ``_CachedTorchDispatchMode`` in torch/utils/checkpoint.py (2.13.0); ``OlmoAttention.forward`` in
    # transformers/models/olmo/modeling_olmo.py (5.23.0).
    every = any(getattr(run.layer.feed_forward, "every_expert", False) for run in model.spec.runs)
    if every and setup.config.activation_checkpointing == "selective":
        raise CannotAnswerError(
            f"{setup.name}: activation_checkpointing: selective keeps a product that {model.spec.name}'s experts are then added to in "
            "place, which torch refuses; use full or none"
        )
    targets = set(setup.config.adapter.targets) if setup.config.adapter is not None else set()
    retained = "all-linear" not in targets and not targets >= {"q_proj", "k_proj", "v_proj"}
    clipped = any(getattr(run.layer.attention, "clip", 0.0) for run in model.spec.runs)
    if retained and clipped and setup.config.activation_checkpointing == "selective":
        raise CannotAnswerError(
            f"{setup.name}: activation_checkpointing: selective keeps products that {model.spec.name} clips in place "
            "(clip_qkv), which torch refuses; use full or none"
        )


def refuse_whole_load(model: Model, setup: TrainingSetup, usable_bytes: int) -> None:
    """Refuse shards of a model that a GPU cannot hold whole in fp32, as it does while it is loaded.

    Source:
        ``_init_model`` in llamafactory/v1/core/model_engine.py (0.9.5), where ``init_config`` does not say otherwise.

    Raises:
        CannotAnswerError: It cannot.
    """
    whole = 4 * parameter_count(model.inventory)
    if setup.stack.sharded_units == "own-root" and is_sharded(setup.config.parallel) and whole > usable_bytes:
        raise CannotAnswerError(
            f"{setup.name}: stack: {setup.stack.label} loads all of {model.spec.name} in fp32 on each GPU before it is sharded, "
            f"{format_bytes(whole)}, which is more than the {format_bytes(usable_bytes)} that are usable; loading by its init_config is not modelled"
        )


def refuse_window(model: Model, setup: TrainingSetup, length: int) -> None:
    """Refuse sequences beyond a window where a stack's code masks them in a way that is not followed.

    Raises:
        CannotAnswerError: ``length`` is beyond the window.

    Source:
        ``_sdpa_packed_segments`` and ``_windowed_causal_mask`` in unsloth/utils/attention_dispatch.py (2026.10.9);
        ``_update_causal_mask`` of transformers' models before 4.53, one mask of floats for all layers.
    """
    differs = setup.stack.model_code == "unsloth" or setup.stack.models.attended_of(model.spec.architecture).startswith(
        "repeated"
    )
    if differs and 0 < model.spec.window < length:
        raise CannotAnswerError(
            f"sequence_length: {length} is beyond the window of {model.spec.window} tokens of {model.spec.name}, whose mask is not "
            f"modelled for {setup.stack.label}"
        )


def refuse_unlearned(model: Model, length: int) -> None:
    """Refuse sequences that are longer than a model has learned positions for.

    Raises:
        InvalidFileError: ``length`` is beyond them.
    """
    spec = model.spec
    if 0 < spec.learned_positions < length:
        raise InvalidFileError(
            [f"sequence_length: {length} is beyond the {spec.learned_positions} learned positions of {spec.name}"]
        )
