"""Keys of ``method`` and ``images``: what a step learns from."""

from typing import Literal

from memplan.documents.frozen_values import dataclass

Divergence = Literal["forward-kl", "reverse-kl", "jsd"]
DistillingTrainer = Literal["gkd", "distillation"]

Stage = Literal[
    "sft", "classification", "embedding", "dpo", "kto", "reward", "orpo", "cpo", "simpo", "grpo", "ppo", "distillation"
]
"""What a step learns from: rows of tokens; rows that have a class each; texts whose embeddings are compared; pairs of answers, chosen
and rejected; answers that are said to be good or bad; answers that the model has generated itself, which are scored, by ``ppo`` beside a
model of values that trains too; or rows whose next tokens a teacher foretells."""

SCORED: frozenset[Stage] = frozenset(("reward", "classification"))
"""Stages whose model yields scores in place of logits."""

ReferenceModel = Literal["none", "resident", "adapter-off", "precomputed"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """The completions that a step learns from, and what generates them.

    Attributes:
        completion_length: Tokens of each row that are generated, the rest being its prompt.
        micro_batches: Micro-batches whose rows are generated together; None is as many as a step accumulates.
        iterations: Steps that learn from the same completions.
        engine: ``transformers`` generates with the model that is trained; ``vllm`` is an engine on the same GPU, with
            weights of its own; ``server`` one elsewhere.
        engine_fraction: Share of the GPU that an engine on it takes.
        sleeps: Whether that engine lets go of its memory while a step runs.
    """

    completion_length: int = 256
    micro_batches: int | None = None
    iterations: int = 1
    engine: Literal["transformers", "vllm", "server"] = "transformers"
    engine_fraction: float = 0.3
    sleeps: bool = False


Pooling = Literal["mean", "last", "cls"]


@dataclass(frozen=True, slots=True)
class Embedding:
    """The texts whose embeddings are compared, and how.

    Attributes:
        columns: Texts of each example: an anchor, what is like it, and negatives.
        pooling: What of a row's tokens becomes its embedding: their mean, the last one, or the first.
        loss: ``in-batch-negatives`` compares each anchor with all texts of the micro-batch that are no anchors; ``pairs`` texts of
            one example alone.
        mini_batch_size: Rows that a cached loss embeds at a time, twice, the second time with gradients; None embeds all at once.
        merges: Whether the columns behind the first pass through the model in one forward; None is as the stack does.
    """

    columns: int = 2
    pooling: Pooling = "mean"
    loss: Literal["in-batch-negatives", "pairs"] = "in-batch-negatives"
    mini_batch_size: int | None = None
    merges: bool | None = None

    @property
    def forwards(self) -> tuple[int, ...]:
        """Columns that pass through the model together, forward by forward; a cached loss embeds each alone."""
        merged = self.merges and self.mini_batch_size is None and self.columns > 2
        return (1, self.columns - 1) if merged else (1,) * self.columns


@dataclass(frozen=True, slots=True)
class Ppo:
    """How a phase of PPO learns from the rows that it has generated.

    Attributes:
        epochs: Times that it goes over them.
        mini_batches: Parts of them whose results the loop has names for until the part is done.
        forward_batch: Rows that are generated, and judged, at a time.
    """

    epochs: int = 4
    mini_batches: int = 1
    forward_batch: int = 64


@dataclass(frozen=True, slots=True)
class SecondModel:
    """A model of its own beside the one that is trained: frozen, but for a model of values.

    Attributes:
        model: Its name, file or directory, as any model's.
        weights: Format of its matrices where they are quantised; None is its dtype.
        dtype: Dtype of all that is not quantised; None is bf16, as most checkpoints are.
    """

    model: str = ""
    weights: str | None = None
    dtype: Literal["bf16", "fp16", "fp32"] | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """What a step learns from, and the model that it is compared with.

    Attributes:
        stage: ``sft``, which pretraining is too; or a preference method, whose micro-batch counts pairs where it has pairs.
        reference_model: ``resident`` is a frozen second copy; ``adapter-off`` the model without its adapters;
            ``precomputed`` none, its log-probabilities having been computed before; None is as the stack does.
        rollout: What a method learns from that generates, which others have not.
        chosen_nll: Whether the likelihood of chosen answers is a second loss; None is as the stage has it.
        embedding: The texts that embeddings are learnt from, which other stages have not.
        balances: Whether a loss of unbalanced experts is added, for which routers' logits of all layers stay; None is as the stack does.
        labels: Classes that rows are told apart by, one score each; None is 2, as transformers has it.
        teacher: The model that a step learns from, which distillation alone has.
        value_model: The model of values that PPO trains beside its policy; None is as the reward model.
        reward_model: The model that scores what PPO's policy has generated.
        ppo: How PPO goes over what was generated.
        divergence: What student and teacher are compared by; None is as the trainer has it.
        trainer: What runs a distillation: ``gkd`` compares whole logits, of rows of the data or generated; ``distillation`` hidden
            states, tile by tile, of generated rows alone. None is ``gkd``.
    """

    stage: Stage = "sft"
    reference_model: ReferenceModel | None = None
    rollout: Rollout | None = None
    chosen_nll: bool | None = None
    labels: int | None = None
    balances: bool | None = None
    teacher: SecondModel | None = None
    value_model: SecondModel | None = None
    reward_model: SecondModel | None = None
    ppo: Ppo | None = None
    divergence: Divergence | None = None
    trainer: DistillingTrainer | None = None
    embedding: Embedding | None = None


@dataclass(frozen=True, slots=True)
class Images:
    """Images in the rows that a vision-language model learns from: as many in each row, all of one size.

    Attributes:
        per_row: Images in each row; 0 for rows of text.
        height: Pixels of each as its processor hands it on, after it has resized it: whole patches that are merged.
        width: The same.
        pixels: In their place: the most pixels that its processor leaves an image, of which the largest grid is planned.
        tower: Whether the vision tower is trained or frozen; None is as the stack does, and frozen beside adapters.
        projector: The same of what merges patches and hands them to the text model.
    """

    per_row: int = 0
    height: int | None = None
    width: int | None = None
    pixels: int | None = None
    tower: Literal["trained", "frozen"] | None = None
    projector: Literal["trained", "frozen"] | None = None
