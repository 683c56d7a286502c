"""A model given by explicit shapes on the command line: a Llama-like one."""

from __future__ import annotations

from memplan.errors import InvalidFileError
from memplan.model.families import read_config
from memplan.model.model import Model
from memplan.units import ceil_div, round_up

SOURCE = "command line"

_OPTIONS = {
    "hidden_size": "--hidden",
    "intermediate_size": "--intermediate",
    "num_hidden_layers": "--layers",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "vocab_size": "--vocab",
}


def model_from_shapes(
    *,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int = 32_000,
    tied: bool = False,
    name: str = "custom",
) -> Model:
    """Return a Llama-like model of the given shapes.

    Args:
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward part; by default Llama's, :func:`llama_intermediate`.
        kv_heads: Key and value heads; by default as many as query heads.
        head_dim: Width of a head; by default ``hidden / heads``, which must come out even.
        vocab: Rows of the embedding; by default those of Llama 1 and 2.
        tied: Whether head and embedding are one tensor.
        name: What to call the model.

    Raises:
        InvalidFileError: A value is not a positive integer, is absurd, or does not go with another.

    Example:
        >>> from memplan.model.inventory import parameter_count
        >>> parameter_count(model_from_shapes(layers=32, hidden=4096, heads=32).inventory)
        6738415616
    """
    usable = type(hidden) is int and hidden > 0
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": llama_intermediate(hidden) if intermediate is None and usable else intermediate or 0,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    if intermediate is None and not usable:
        config["intermediate_size"] = 1  # the message about the width is enough
    spec, notes = read_config(config, name, SOURCE, lambda key: _OPTIONS.get(key, key))
    model = Model.from_spec(spec, SOURCE)
    return Model(model.spec, model.inventory, SOURCE, notes=notes)


def llama_intermediate(hidden: int) -> int:
    """Return the feed-forward width that Llama has at a given width.

    Formula:
        ``round_up(ceil(8 / 3 * hidden), 256)``: two thirds of 4 * hidden, so that three
        matrices cost what two of 4 * hidden would, rounded up to a multiple of 256.

    Args:
        hidden: Width of the residual stream; at least 1.

    Raises:
        InvalidFileError: ``hidden`` is not positive.

    Source:
        https://arxiv.org/abs/2302.13971, section 2.2, and ``FeedForward`` with
        ``multiple_of=256`` in https://github.com/meta-llama/llama.

    Example:
        >>> llama_intermediate(4096), llama_intermediate(5120)
        (11008, 13824)
    """
    if hidden < 1:
        raise InvalidFileError([f"--hidden: expected at least 1, got {hidden}"])
    return round_up(ceil_div(8 * hidden, 3), 256)
