"""Rows of a micro-batch as loops have them on the device: as collated, as generated, as joined, and those of an evaluation."""

from memplan.model.spec import ModelSpec
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.distillation_rules import DISTILLED

ROW_NUMBER_BYTES = 4
"""Of a token of joined rows: which of them it is in (``seq_idx`` in trl/trainer/sft_trainer.py, 1.16.0)."""


ID_BYTES = MASK_BYTES = LABEL_BYTES = 8
"""Of a token: its number, whether it is padding, and its label; each in 64 bits."""


BYTE_OFFSETS_BYTES = 2 * 8
"""Of a token: where it begins and ends in its text, which the collator of GKD makes too (``DataCollatorForChatML`` in
trl/experimental/utils.py, 1.16.0)."""

PROMPT_BYTES = 2 * 8
"""Of a token of a prompt: its number and mask, which that collator has by themselves."""


def keeps_old_log_probabilities(setup: TrainingSetup) -> bool:
    """Return whether the log-probabilities that completions were generated with are computed beforehand.

    Source:
        ``_generate_and_score_completions`` in trl/trainer/grpo_trainer.py (1.16.0): where steps and generations are
        not aligned, and always where an engine generates; a teacher is asked of them in the step itself.
    """
    every = setup.generated_micro_batches * setup.rollout.iterations
    apart = setup.rollout.engine != "transformers" or setup.config.gradient_accumulation_steps % every != 0
    return apart and setup.config.method.stage not in DISTILLED


def prompt_rows(setup: TrainingSetup, micro_steps: int) -> Form:
    """Return prompts by themselves, which rows that a teacher judges come with: of one token, where nothing is generated from them."""
    if setup.profile.loss != "divergence":
        return ZERO
    size, answer = PROMPT_BYTES * micro_steps, setup.completion_length
    one = single_form(Part.ACTIVATIONS, Quantity.SEQUENCES, size)
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, size) - one * answer if answer else one


def collated_bytes(setup: TrainingSetup, micro_steps: int = 1) -> int:
    """Return what a collator makes of a token, in so many micro-batches where the loop fetches those of a step together."""
    batch = sum(part.element_bytes * (micro_steps if part.kept else 1) for part in setup.stack.batch)
    if setup.config.joined_rows:
        batch += ROW_NUMBER_BYTES * micro_steps
    if setup.scores:
        batch = batch * 2 // 3  # no labels
    if setup.profile.loss == "divergence":
        batch += BYTE_OFFSETS_BYTES * micro_steps
    if setup.config.method.stage == "kto":
        batch *= 2  # mismatched answers besides, ``KL_input_ids`` and the like (trl/trainer/kto_trainer.py, 1.16.0)
    return batch


def token_types(spec: ModelSpec, setup: TrainingSetup, micro_steps: int = 1) -> int:
    """Return what a collator makes of a token besides where an encoder's tokenizer tells its type."""
    # Source: ``model_input_names`` in transformers/models/bert/tokenization_bert.py (5.24.0).
    if spec.encoder is None or not spec.encoder.typed_rows:
        return 0
    return ID_BYTES * (micro_steps if any(part.kept for part in setup.stack.batch) else 1)


def evaluated_rows(setup: TrainingSetup, typed: int = 0) -> Form:
    """Return the rows that an evaluation reads, beside those of the last step, which the loop still has names for.

    Args:
        typed: Bytes of a token's type, where a tokenizer tells it.

    Source:
        ``batch_samples`` and ``inputs`` in ``_run_epoch``, which calls ``evaluate``, in transformers/trainer.py (5.24.0); ``batch`` in
        ``fit``, which calls ``validate``, in litgpt/finetune/lora.py (0.5.13).
    """
    if setup.stack.evaluates_in_place and not setup.evaluates_apart:
        return ZERO
    if setup.answer_length:
        return single_form(Part.ACTIVATIONS, Quantity.TOKENS, ID_BYTES + MASK_BYTES)
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, collated_bytes(setup) + typed)


def generated_rows(setup: TrainingSetup) -> Form:
    """Return the completions that steps learn from, with their prompts, masks and log-probabilities.

    Source:
        ``_prepare_inputs`` and ``_compute_loss`` in trl/trainer/grpo_trainer.py (1.16.0).
    """
    together = setup.generated_micro_batches
    engine, compared = setup.rollout.engine != "transformers", setup.config.method.reference_model != "none"
    logs = 4 * (keeps_old_log_probabilities(setup) + engine + compared)  # an engine tells those that it sampled by
    logs = 0 if setup.teacher is not None else logs
    rows = single_form(Part.ACTIVATIONS, Quantity.TOKENS, (ID_BYTES + MASK_BYTES) * together)
    return rows + single_form(Part.ACTIVATIONS, Quantity.ANSWER_TOKENS, logs * together)


def joined_ids(setup: TrainingSetup, *, forward: bool) -> Form:
    """Return what completions, or chosen and rejected answers, are joined to: ids, which an embedding that is trained saves; in forward mask and labels too.

    Source:
        ``concatenated_inputs`` in trl/experimental/orpo/orpo_trainer.py (1.16.0).
    """
    if not setup.joins_rows:
        return ZERO
    saved = ID_BYTES if setup.config.adapter is None else 0
    labels = 0 if setup.copies_logits or setup.teacher is not None else LABEL_BYTES
    retained = ID_BYTES + MASK_BYTES + labels if forward else saved
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, retained)
