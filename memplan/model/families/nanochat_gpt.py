"""nanochat's own GPT: norms without weights, embeddings of values, gates and scalars beside its layers' matrices.

It is built of a script's flags alone (:func:`memplan.model.readers.given_shapes.model_from_flags`) and has no ``config.json``;
what transformers calls ``nanochat`` is an older model without most of this.

Source:
    ``GPT.__init__``, ``has_ve`` and ``_compute_window_sizes`` in nanochat/gpt.py of https://github.com/karpathy/nanochat (92d63d4e).
"""

from collections.abc import Iterator
from dataclasses import replace

from memplan.model.families.common_parts import GPT_NAMES, attention, model, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm
from memplan.model.tower import TowerTensor
from memplan.units import ceil_div, round_up

ARCHITECTURE = "nanochat"
WORDS = 64
"""Words that the vocabulary is padded to a multiple of (``pad_vocab_size_to``)."""
ROTARY_FACTOR = 10
"""Sequences that its tables of cosines and sines are long (``rotary_seq_len``)."""
GATE_CHANNELS, SMEAR_CHANNELS = 12, 24
"""Channels that the gate of a layer's values, and that of the token before, are made of."""
WINDOW_BLOCK = 128
"""Tokens that a short window, a quarter of the sequence, is a multiple of."""
SOFTCAP = 15.0
NAMES = GPT_NAMES._replace(query="c_q", key="c_k", value="c_v")


def nanochat_gpt(config: ConfigValues) -> ModelSpec:
    """Return the model that ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``vocab_size``, ``sequence_length`` and ``window_pattern`` give."""
    common, norm = shape(config), Norm(weight=False)
    length, pattern = config.integer("sequence_length"), config.text("window_pattern", "L").upper()
    if not pattern or set(pattern) - set("SL"):
        config.problem("window_pattern", f"expected letters S and L, got {pattern!r:.60}")
    if common.num_attention_heads * common.head_dim != common.hidden_size:
        config.conflict("head_dim", f"{common.num_attention_heads} heads of {common.head_dim} are not the width")
    config.only("linear_bias", False)
    config.expect("intermediate_size", 4 * common.hidden_size)
    heads = attention(config, common, query_key_norm=norm, norms_rotated=True)
    mlp = Mlp(4 * common.hidden_size, "relu-squared", gated=False)
    words, layers = round_up(common.vocab_size, WORDS), common.num_hidden_layers
    short = WINDOW_BLOCK * ceil_div(ceil_div(length, 4), WINDOW_BLOCK)
    letters = [(pattern or "L")[layer % len(pattern or "L")] for layer in range(layers - 1)] + ["L"]
    windowed = "S" in letters and short < length
    return replace(
        model(config, common, Layer(heads, mlp, norm), final_logit_softcap=SOFTCAP, embedding_norm=norm, names=NAMES),
        architecture=ARCHITECTURE,
        vocab_size=words,
        cut_words=words - common.vocab_size,
        max_position_embeddings=ROTARY_FACTOR * length,
        window=short if windowed else 0,
        full_layers=tuple([layer for layer, letter in enumerate(letters) if letter == "L"]) if windowed else (),
        beside=tuple(_beside(words, layers, heads.num_heads, common.hidden_size)),
    )


def has_values(layer: int, layers: int) -> bool:
    """Tell whether a layer has an embedding of values: every second one, the last among them.

    Example:
        >>> [has_values(layer, 5) for layer in range(5)]
        [True, False, True, False, True]
    """
    return layer % 2 == (layers - 1) % 2


def _beside(words: int, layers: int, heads: int, width: int) -> Iterator[TowerTensor]:
    """Yield the parameters of no layer's projection; gates of values are matrices, which Muon takes."""
    for name in ("resid_lambdas", "x0_lambdas"):
        yield TowerTensor(name, (layers,), "bias")
    yield TowerTensor("smear_lambda", (1,), "bias")
    yield TowerTensor("backout_lambda", (1,), "bias")
    yield TowerTensor("smear_gate.weight", (1, SMEAR_CHANNELS), "bias")
    for layer in range(layers):
        if has_values(layer, layers):
            yield TowerTensor(f"transformer.h.{layer}.attn.ve_gate.weight", (heads, GATE_CHANNELS), "hidden_matrix")
            yield TowerTensor(f"value_embeds.{layer}.weight", (words, width), "embedding")
