"""Pieces in which a fused loss forms logits: of how many tokens, and of all words or of a tile of them.

Source:
    Sizes of what ``unsloth_fused_ce_loss`` of unsloth_zoo 2026.10.9 allocates on tensors without memory: 1,000 to 262,144 words,
    rows of 256 to 16,384 features, 65 to 65,536 tokens, cards of 8 to 80 GiB. The memory that is free changes none of them.
"""

from __future__ import annotations

TILED = ("tiled-linear", "pieced-linear")
"""Such losses: on a small card, and on a large one."""
LARGE_CARD_BYTES = 24 * 1024**3
"""What a large card has more than."""
FEW_WORDS, TILE_WORDS = 32768, 16384
"""Words of a vocabulary whose logits are always formed together, and how many of a larger one are."""
SHORT_BATCH = 4096
"""Tokens up to which a large card forms logits of all words."""
PIECE_NUMBERS = 2**26
"""Logits that a piece of all words has about."""
LEAST_ROWS, MOST_ROWS, WIDE_ROW = 512, 4096, 8192
"""Tokens of such a piece; rows of a multiple of so many features have the most."""


def has_all_words(loss: str, vocab_size: int, tokens: int) -> bool:
    """Tell whether logits of a piece are of the whole vocabulary, given the tokens of a micro-batch."""
    return vocab_size <= FEW_WORDS or (loss == "pieced-linear" and tokens <= SHORT_BATCH)


def piece_rows(vocab_size: int, hidden_size: int, *, whole: bool) -> int:
    """Return the most tokens whose logits are formed together, of all words or of a tile of them.

    Example:
        >>> piece_rows(32000, 4096, whole=True), piece_rows(128256, 4096, whole=True), piece_rows(128256, 4096, whole=False)
        (2048, 512, 4096)
    """
    if not whole or (vocab_size <= FEW_WORDS and hidden_size % WIDE_ROW == 0):
        return MOST_ROWS
    power = 1 << ((PIECE_NUMBERS // vocab_size).bit_length() - 1)
    return max(LEAST_ROWS, min(power, MOST_ROWS))


def next_rows(predicted: int, most: int, *, whole: bool) -> int:
    """Return rows by which a second piece takes more than the first, whose last tensor is still there.

    Args:
        predicted: Tokens that have a next one.
        most: Tokens of a piece.
        whole: Whether pieces are of all words.
    """
    first = min(predicted, most)
    second = min(predicted - first, most)
    return max(0, 4 * second - 3 * first) if whole else second
