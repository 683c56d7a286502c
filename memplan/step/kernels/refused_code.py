"""Kernels, codes, adapters and checkpointing that a family's code, or a library's own layers, do not run under, or not as modelled."""

from collections.abc import Iterator

from memplan.catalog.entries import Gpu
from memplan.catalog.training_config import ALL_TRAIN
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.routed_experts import experts_of
from memplan.model.spec import Attention, LatentAttention, MixtureOfExperts, ModelSpec
from memplan.step.kernels.family_code import family_code
from memplan.step.kernels.refused_recurrences import refuse_recurrences
from memplan.step.kernels.refused_row_masks import refuse_joined_rows, refuse_padded_rows
from memplan.step.states.parallel_shards import is_replicated, looks_for_unused_parameters
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

FEED_FORWARD = frozenset(("gate_proj", "up_proj", "down_proj"))


def refuse_own_adapters(model: Model, setup: TrainingSetup) -> None:
    """Raise for what the builders of a stack's own models have no words for, or its codes no layout.

    Raises:
        CannotAnswerError: The stack cannot build that.

    Source:
        ``lora_*`` in torchtune/models/*/_component_builders.py (0.6.1); ``NF4Tensor.from_tensor`` in
        torchao/dtypes/nf4tensor.py (0.13.0).
    """
    _refuse_codes(model, setup)
    stack, adapter = setup.stack, setup.config.adapter
    if stack.model_code == "unsloth":
        for key, what, instead in _unfollowed(setup):
            raise CannotAnswerError(f"{setup.name}: {key}: {what} is not modelled for {stack.label}; {instead}")
    if stack.model_code != "torchtune":
        return
    heads = model.spec.runs[0].layer.attention
    code = family_code(stack, model.spec.architecture)
    if isinstance(heads, Attention) and heads.query_size != model.spec.hidden_size and not code.own_head_width:
        raise CannotAnswerError(
            f"stack: {stack.label} builds {model.spec.architecture} of heads that together are as wide as the model, "
            f"which those of {model.spec.name} are not"
        )
    if adapter is None or "all-linear" in adapter.targets:
        return
    where = f"{setup.name}: adapter.targets: {stack.label}"
    if 0 < len(FEED_FORWARD & set(adapter.targets)) < len(FEED_FORWARD):
        names = ", ".join(sorted(FEED_FORWARD))
        raise CannotAnswerError(f"{where} puts adapters on all of {names} or on none of them (apply_lora_to_mlp)")
    if FEED_FORWARD.issuperset(adapter.targets):
        raise CannotAnswerError(f"{where} has no adapters without one on a projection of attention")


def _unfollowed(setup: TrainingSetup) -> Iterator[tuple[str, str, str]]:
    """Yield what of a job has another path through unsloth's code than has been followed: the key, what it is, and what to do."""
    # Source: ``FastLanguageModel.from_pretrained`` in unsloth/models/loader.py, ``patch_peft_model`` in
    # models/llama.py, ``_dropout_forward`` in kernels/fast_lora.py, ``run_attention`` in utils/attention_dispatch.py
    # (2026.10.9).
    config, adapter = setup.config, setup.config.adapter
    if adapter is None:
        yield "adapter", "training all weights, which runs on FastModel's path,", "use lora or qlora"
        return
    if adapter.kind == "dora":
        yield "adapter.kind", f"{adapter.kind}, which PEFT's own code runs,", "use lora"
    if adapter.dropout:
        yield "adapter.dropout", "dropout before adapters, whose masks are kept,", "use 0 (lora_dropout = 0)"
    if config.compute_dtype != "bf16":
        yield "compute_dtype", config.compute_dtype, "use bf16, on a card of compute capability 8.0 or above"
    if setup.profile.attention not in ("flash", "cudnn") or config.kernels.attention not in (None, "auto"):
        able = "use auto, on a card of compute capability 8.0 to 9.0, or of 12.0"
        yield (
            "kernels.attention",
            f"another attention than torch's own choice of flash or cuDNN ({setup.profile.attention})",
            able,
        )
    if setup.checkpointing == "selective":
        yield "activation_checkpointing", "selective", "use full or none"
    if config.parallel.gpus > 1:
        yield "parallel", "a job on several GPUs", "use one"
    if config.evaluation or config.weight_average != "none" or config.zero_gradients == "fill":
        yield "evaluation", "evaluation, an average of weights, or gradients filled with zeros", "leave it out"


def _refuse_codes(model: Model, setup: TrainingSetup) -> None:
    """Raise for codes of another library than the stack's, and for matrices that they do not cover in whole blocks."""
    stack, adapter = setup.stack, setup.config.adapter
    name = setup.format_names["hidden_matrix"]
    stored = setup.formats["hidden_matrix"]
    where = f"{setup.name}: weights.hidden_matrix: {name}"
    for role, other in setup.formats.items():
        if other.decoding_temporaries and (role != "hidden_matrix" or not stack.projections.codes_saved):
            told = f"{setup.name}: weights.{role}: {setup.format_names[role]}"
            raise CannotAnswerError(f"{told} is decoded by operators of torch, which is not modelled for {stack.label}")
    if adapter is None or not stored.decoding_temporaries:
        return
    if setup.config.compute_dtype != "bf16":
        raise CannotAnswerError(f"{where} is modelled over bf16, and not over {setup.config.compute_dtype}")
    code = family_code(stack, model.spec.architecture)
    matrices = [tensor for tensor in model.inventory if tensor.role == "hidden_matrix"]
    if odd := [tensor for tensor in matrices if tensor.elements % stored.block_elements]:
        raise CannotAnswerError(
            f"{where}: torchao quantises matrices of a multiple of {stored.block_elements} numbers, and "
            f"{odd[0].name} has {odd[0].elements}"
        )
    names = {tensor.name.removesuffix(".weight").rsplit(".", 1)[-1] for tensor in matrices}
    rest = names.difference(adapter.targets) if "all-linear" not in adapter.targets else set()
    if rest and code.quantises_adapted:
        raise CannotAnswerError(
            f"{where}: {stack.label} leaves projections of {model.spec.architecture} without adapters as floats "
            f"({', '.join(sorted(rest))}): not modelled; target all-linear"
        )


LIGER_FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Families whose layers run Liger's kernels as the tape has them (liger_kernel/transformers/monkey_patch.py, 0.8.5): others of
its list split one projection into copies (phi3), keep gradients apart (olmo2), or run experts."""


def refuse_unread_code(model: Model, setup: TrainingSetup) -> None:
    """Raise for whatever a stack's code does of a model that is not modelled, on one GPU and over several alike.

    Raises:
        CannotAnswerError: A part of the model, or a kernel over it, whose activations are not modelled.
    """
    refuse_unquantised(model.spec, setup)
    _refuse_fused_loss(model.spec, setup)
    refuse_unrun_parts(model.spec)
    refuse_foreign_parts(model.spec, setup)
    refuse_liger(model.spec, setup)
    refuse_cut_cross_entropy(model.spec, setup)
    refuse_own_adapters(model, setup)
    refuse_recurrences(model.spec, setup)
    refuse_joined_rows(model.spec, setup)
    refuse_padded_rows(model.spec, setup)
    _refuse_marked_twice(setup)


def _refuse_marked_twice(setup: TrainingSetup) -> None:
    """Raise for replicas that look for unused parameters beside reentrant checkpointing, whose layers they take for unused.

    Raises:
        CannotAnswerError: torch would end with an error.

    Source:
        ``Reducer::mark_variable_ready`` and ``Reducer::prepare_for_backward`` in torch/csrc/distributed/c10d/reducer.cpp (v2.13.0): the
        graph that it goes through has nothing of what is inside ``CheckpointFunction``.
    """
    config = setup.config
    trained = config.adapter is not None or config.freeze == ALL_TRAIN
    again = setup.checkpointing != "none" and setup.stack.checkpointing.reentrant
    if trained and again and is_replicated(config.parallel) and looks_for_unused_parameters(setup):
        raise CannotAnswerError(
            'parallel.unused_parameters: DistributedDataParallel ends with "Expected to mark a variable ready only once" where it '
            "looks for unused parameters beside reentrant checkpointing; set parallel.unused_parameters: false, or "
            "reentrant_checkpointing: false"
        )


def _refuse_fused_loss(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for a loss that TRL's own code cannot form of a family's models.

    Raises:
        CannotAnswerError: Its fused head, or its loss of unbalanced experts, asks for what the family's code has not.

    Source:
        ``_fused_forward`` in trl/trainer/utils.py, ``aux_loss_enabled`` in sft_trainer.py (1.16.0); ``load_balancing_loss_func`` in
        transformers/models/granitemoehybrid/modeling_granitemoehybrid.py (5.23.0), which returns a number where there are no routers;
        ``InternVLModelOutputWithPast`` in transformers/models/internvl/modeling_internvl.py (5.24.0).
    """
    code = family_code(setup.stack, spec.architecture)
    balances = setup.balances and code.balances
    off = "set method.balances=false (router_aux_loss_coef: 0.0)" if balances else "kernels.loss: fp32"
    if code.unfused and setup.profile.loss == "fused-head" and balances == code.balances:
        raise CannotAnswerError(
            f"model: the loss of {setup.stack.label} ends with \"object has no attribute '{code.unfused}'\" for {spec.name} "
            f"(_fused_forward in trl/trainer/utils.py, 1.16.0); use --stack transformers, or {off}"
        )
    if code.drops_routers and setup.balances and experts_of(spec):
        raise CannotAnswerError(
            f"model: {setup.stack.label} asks {spec.name} for a loss of unbalanced experts, and what its model returns takes no "
            "'router_logits'; set method.balances=false (router_aux_loss_coef: 0.0)"
        )
    if balances and not experts_of(spec):
        raise CannotAnswerError(
            f"model: {setup.stack.label} asks {spec.name} for a loss of unbalanced experts, of which it has none, and ends; {off}"
        )


def refuse_foreign_parts(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for parts of a model that those that a stack trains do not have.

    Raises:
        CannotAnswerError: They are not transformers' own.
    """
    for what in _foreign_parts(spec) if setup.stack.model_code != "transformers" else ():
        raise CannotAnswerError(
            f"{spec.name} has {what}, as models of transformers have and those of stack {setup.stack.name} do not: "
            "use a stack of transformers, such as --stack trl"
        )


def _foreign_parts(spec: ModelSpec) -> Iterator[str]:
    """Yield what models of transformers alone have."""
    parts = [run.layer.attention for run in spec.runs]
    if spec.state_space is not None:
        yield "state space layers"
    if any(getattr(run.layer.feed_forward, "shared_fused", False) for run in spec.runs):
        yield "shared experts with one projection up"
    if any(run.layer.placement == "alone" for run in spec.runs):
        yield "layers of one part"
    if any(getattr(run.layer.feed_forward, "activation", "") == "xielu" for run in spec.runs):
        yield "an activation with parameters"
    if spec.alibi:
        yield "ALiBi, a bias of its scores"
    if spec.convolves:
        yield "short convolutions"
    if any(getattr(run.layer.feed_forward, "every_expert", False) for run in spec.runs):
        yield "experts that are all given every token"
    if any(getattr(part, "value_norm", False) for part in parts):
        yield "normalised values"
    if any(isinstance(part, LatentAttention) and part.scales_query for part in parts):
        yield "latent attention whose queries are scaled by their position"
    if getattr(parts[0], "query_key_norm_scope", "head") == "each":
        yield "a norm of each head by a scale of its own"


def refuse_masked_windows(spec: ModelSpec, setup: TrainingSetup, gpu: Gpu) -> None:
    """Raise for attention within a window that a stack gives a mask on this card.

    Raises:
        CannotAnswerError: With what to set instead.

    Source:
        ``_load_flash_attention_3`` and ``_sdpa_attention`` in nanochat/flash_attention.py (92d63d4e).
    """
    cards = setup.stack.models.windowed_on
    if spec.window and cards and gpu.compute_capability not in cards:
        raise CannotAnswerError(
            f"model: attention within windows of {spec.window:,} tokens is given a mask of all pairs of tokens on {gpu.name}, "
            f"as {setup.stack.name} has a kernel for them on compute capability {', '.join(cards)} alone, which is not modelled; use --window-pattern L"
        )


def refuse_liger(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for Liger's kernels where nothing runs them, or not as they are modelled.

    Raises:
        CannotAnswerError: A family that is not in the list.
    """
    used = setup.profile
    if spec.logit_scale and used.loss in ("cut-cross-entropy", "token-chunks", "token-chunks-fp32"):
        raise CannotAnswerError(f"kernels.loss: {used.loss} of {spec.name}, whose logits are scaled, is not modelled")
    requested = {"norm": used.norm, "rotary": used.rotary, "activation": used.activation, "loss": used.loss}
    kernels = [key for key, value in requested.items() if value == ("fused-linear" if key == "loss" else "in-place")]
    if not kernels or setup.stack.model_code != "transformers":
        return
    where = f"kernels.{kernels[0]}: {requested[kernels[0]]}"
    if spec.architecture not in LIGER_FAMILIES:
        raise CannotAnswerError(
            f"{where} of {spec.architecture}, as Liger runs it, is not modelled; it is for {', '.join(LIGER_FAMILIES)}"
        )


def refuse_unrun_parts(spec: ModelSpec) -> None:
    """Raise for parts of a layer whose activations are not modelled, as only Megatron-LM's flags build them.

    Raises:
        CannotAnswerError: Experts without a gate, or a quick GELU.
    """
    for part, placement in [(run.layer.feed_forward, run.layer.placement) for run in spec.runs]:
        if part is not None and part.activation == "quick-gelu":
            raise CannotAnswerError(f"{spec.name}: activations of a quick GELU are not modelled")
        if isinstance(part, MixtureOfExperts) and not part.gated and placement != "alone":
            raise CannotAnswerError(f"{spec.name}: activations of experts without a gate are not modelled")


def refuse_cut_cross_entropy(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for cut cross-entropy where nothing runs it.

    Raises:
        CannotAnswerError: Another library's models, a family that its forward does not fit, or a head in 32 bits.

    Source:
        ``patch_llama_like`` in axolotl/integrations/cut_cross_entropy/__init__.py (0.21.0); ``cce_backward_kernel`` in
        cut_cross_entropy/cce_backward.py (axolotl-ai-cloud/ml-cross-entropy 100a077), which asserts 16 bits.
    """
    if setup.profile.loss != "cut-cross-entropy":
        return
    where = "kernels.loss: cut-cross-entropy"
    if not spec.names.layer.startswith("model.") or setup.scores:  # the forward calls ``self.model``
        raise CannotAnswerError(
            f"{where} has no forward for {spec.architecture}{' with a score' if setup.scores else ''}"
        )
    if (name := setup.format_names["head"]) not in ("bf16", "fp16"):
        raise CannotAnswerError(f"{where} takes a head in bf16 or fp16, and this one is in {name}")
    if name == "fp16" and setup.residual_bytes > FLOAT_BYTES[name]:
        raise CannotAnswerError(f"{where} stops at rows in fp32 with a head in fp16: use compute_dtype: bf16")


def refuse_unquantised(spec: ModelSpec, setup: TrainingSetup) -> None:
    """Raise for codes in a model whose linear layers a library's loading leaves as they are.

    Raises:
        CannotAnswerError: Its layers are no ``nn.Linear`` (transformers 5.23.0, ``replace_with_bnb_linear``).
    """
    code = family_code(setup.stack, spec.architecture)
    quantised = setup.format_names["hidden_matrix"] not in FLOAT_BYTES
    if (
        quantised
        and code.forms_tables
        and spec.tie_word_embeddings
        and not (spec.final_norm.weight or spec.final_norm.bias)
    ):
        raise CannotAnswerError(
            "weights.hidden_matrix: transformers leaves the module of a model's last parameter as it is when it quantises "
            f"(get_keys_to_not_convert), which in {spec.name} is a projection of the last layer: use weights in 16 bits"
        )
    layer = spec.runs[0].layer
    if code.copies_heads and layer.parallel_norms > 1 and getattr(layer.attention, "num_key_value_heads", 0) == 1:
        raise CannotAnswerError(
            f"{spec.name} has one key-value head that its decoder repeats before it is rotated: not modelled"
        )
    if code.own_linear and quantised:
        raise CannotAnswerError(
            f"weights.hidden_matrix: transformers replaces nn.Linear by bitsandbytes' layers, and {spec.name} has linear "
            "layers of a class of its own, which stay as they are: use weights in 16 bits"
        )
