"""What an encoder has that a decoder has not."""

from memplan.documents.frozen_values import dataclass


@dataclass(frozen=True, slots=True)
class Encoder:
    """What models have whose tokens see all others of their row."""

    token_types: int = 0  # Rows of a table of token types, added to embedded tokens; 0 for none
    typed_rows: bool = False  # Whether a tokenizer tells the type of each token
    reads_pooled: bool = False  # Whether anything reads the projection of the first token, which is formed in any case
    # Whether a head of scores projects the first token itself, in a model without another such projection.
    projects_first: bool = False
