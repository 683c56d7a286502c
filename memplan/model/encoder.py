"""What an encoder has that a decoder has not."""

from typing import Literal

from memplan.documents.frozen_values import dataclass


@dataclass(frozen=True, slots=True)
class Scorer:
    """What makes scores of one token of a row, or of the mean of its tokens, where classes are learnt."""

    dense: str = "pooler.dense"  # Projection in front of the head
    head: str = "classifier"
    bias: bool = True  # Whether that projection has one
    activation: Literal["tanh", "relu", "gelu"] = "tanh"  # Behind it
    drops_first: bool = False  # Whether the token is dropped ahead of it too
    dropout: float | None = None  # Behind the activation; None for that of the residual stream
    norm: str = ""  # A norm behind the activation; empty for none
    mean: bool = False  # Whether tokens are averaged, and not the first one taken


@dataclass(frozen=True, slots=True)
class Encoder:
    """What models have whose tokens see all others of their row."""

    token_types: int = 0  # Rows of a table of token types, added to embedded tokens; 0 for none
    typed_rows: bool = False  # Whether a tokenizer tells the type of each token
    pools: bool = True  # Whether the model projects the first token, whether or not anything reads that
    reads_pooled: bool = False  # Whether anything reads it
    scorer: Scorer = Scorer()  # What classes are learnt by
    checkpoints: bool = True  # Whether its code can checkpoint layers
    drops: bool = True  # Whether dropout in it is modelled
    distance_buckets: int = 0  # Rows of a table of biases of scores by distance, one for each head, for all layers
