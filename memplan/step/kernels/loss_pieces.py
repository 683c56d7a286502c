"""Pieces in which a fused loss forms logits: of how many tokens, and of all words or of a tile of them.

Source:
    Sizes of what ``unsloth_fused_ce_loss`` of unsloth_zoo 2026.10.9 allocates on tensors without memory: 1,000 to 310,000 words,
    rows of 256 to 65,536 features, 65 to 131,072 tokens, cards of 8 to 80 GiB, and words and cards on both sides of each step below.
    The memory that is free changes none of them.
"""

from memplan.units import round_up

TILED = ("tiled-linear", "pieced-linear")
"""Such losses: on a small card, and on a large one."""
LARGE_CARD_BYTES = 49 * 1024**3 // 2
"""What a large card has more than: 24.5 GiB are small, 24.52 are large."""
FEW_WORDS, TILE_WORDS = 32768, 16384
"""Words of a vocabulary whose logits are always formed together, and how many of a larger one are."""
SHORT_BATCH = 4096
"""Tokens up to which a large card forms logits of all words."""
PIECE_NUMBERS = 4096 * 18_992
"""Most logits that a piece of all words has where the layers' result has no more numbers: 8 words more halve its tokens."""
LEAST_ROWS, MOST_ROWS = 512, 4096
"""Tokens of such a piece."""
WORDS_TOGETHER = 8
"""What the words of a piece are a multiple of."""


def has_all_words(loss: str, vocab_size: int, tokens: int) -> bool:
    """Tell whether logits of a piece are of the whole vocabulary, given the tokens of a micro-batch.

    Example:
        >>> [has_all_words("pieced-linear", 128_256, tokens) for tokens in (4096, 4097)]
        [True, False]
        >>> [has_all_words("tiled-linear", words, 1) for words in (32_768, 32_769)]
        [True, False]
    """
    return vocab_size <= FEW_WORDS or (loss == "pieced-linear" and tokens <= SHORT_BATCH)


def piece_rows(vocab_size: int, numbers: int, *, whole: bool) -> int:
    """Return the most tokens whose logits are formed together, of all words or of a tile of them.

    Args:
        vocab_size: Words.
        numbers: What the layers' result has: tokens of a micro-batch times the hidden size.
        whole: Whether pieces are of all words.

    Example:
        >>> [piece_rows(words, 2048 * 4096, whole=True) for words in (18_992, 32_000, 128_256)]
        [4096, 2048, 512]
        >>> piece_rows(32_000, 20_000 * 8192, whole=True), piece_rows(128_256, 2048 * 4096, whole=False)
        (4096, 4096)
    """
    if not whole:
        return MOST_ROWS
    rows = max(PIECE_NUMBERS, numbers - 1) // round_up(vocab_size, WORDS_TOGETHER)
    power = 1 << max(0, rows.bit_length() - 1)
    return min(max(LEAST_ROWS, power), MOST_ROWS)


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
