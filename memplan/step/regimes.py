"""What of batch and length decides which operations of a step run at all."""

from dataclasses import replace

from memplan.model.gated_delta_net import CHUNK_TOKENS
from memplan.model.model import Model
from memplan.model.spec import ModelSpec
from memplan.step.blocks.block_settings import Regime
from memplan.step.compiled_layers.compiled_layer import layer_orders, layer_sums
from memplan.step.delta.state_space_kernels import scan_splits
from memplan.step.kernels.family_code import family_code
from memplan.step.kernels.layer_arguments import masks_attention, steps_through_scores
from memplan.step.kernels.loss_pieces import TILED, has_all_words
from memplan.step.losses.token_chunk_loss import IN_PIECES, STRETCH_TOKENS, TOKEN_CHUNK, TOKEN_CHUNKS, pieces_of
from memplan.step.tapes.linear_forms import EMBEDDING_DIRECT_INDICES, LATE_CHUNKS, TILE_TOKENS, answered_tokens
from memplan.step.units.host_memory import copied_widths, waits_on_host
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.stack_rules import beside_codes
from memplan.units import ceil_div

MASK_COLUMNS = 16
"""Columns of a mask that the efficient kernel takes are a multiple of these (attention.cpp, ``pad_bias``)."""


def forwarded_rows(setup: TrainingSetup, batch: int, length: int) -> tuple[int, int]:
    """Return how many rows a forward has for a micro-batch of ``batch``, and how long each is: a pair is two rows, joined rows are one.

    Of the forwards of an embedding loss the last has the most, and a cached one as many as it embeds at a time.
    """
    batch *= setup.rows_per_sample
    if (texts := setup.config.method.embedding) is not None:
        batch = min(batch, texts.mini_batch_size or batch)
    return (1, batch * length) if setup.config.joined_rows else (batch, length)


def setup_in(setup: TrainingSetup, *, padded: bool) -> TrainingSetup:
    """Return a setup as it is for rows with padding or without: a micro-batch of one row has none, as a rule."""
    if not setup.config.padded_rows or padded:
        return setup
    return replace(setup, config=replace(setup.config, padded_rows=False))


def regime_of(model: Model, setup: TrainingSetup, batch: int, length: int) -> Regime:
    """Return which operations run for a micro-batch of ``batch`` and ``length`` tokens; what changes nothing is left at its default."""
    batch, length = forwarded_rows(setup, batch, length)
    padded = setup.config.pads(batch)
    setup = setup_in(setup, padded=padded)
    tokens, spec, profile = batch * length, model.spec, setup.profile
    masked, layers = masks_attention(spec, setup, length), setup.config.compile == "layers"
    sums = layer_sums(spec, tokens) if layers else ()
    learned, delta = spec.learned_positions > 0, spec.linear_attention
    scanned = 0 if spec.state_space is None else spec.state_space.chunk_tokens
    code = family_code(setup.stack, spec.architecture)
    codes = beside_codes(setup.config, setup.format_names["hidden_matrix"])
    return Regime(
        one_sequence=batch == 1 and _differs_for_one(spec, setup),
        one_pair=setup.compares_pairs and batch == setup.rows_per_sample,
        one_token=length == 1,
        one_chunk=(profile.loss == "chunked" and ceil_div(tokens, profile.loss_chunks) == tokens)
        or (profile.loss in TOKEN_CHUNKS and tokens - batch <= TOKEN_CHUNK),
        several_tiles=profile.loss in ("fused-head", "fused-divergence")
        and answered_tokens(batch, length, setup.answer_length) > TILE_TOKENS,
        stretches=pieces_of(profile.loss, batch, length),
        empty_stretch=profile.loss == "fp32-stretches" and length % STRETCH_TOKENS == 1 < length,
        padded=padded,
        masked=masked,
        pads_mask=masked and length % MASK_COLUMNS > 0,
        wide_tables=setup.stack.rotary_tables.dtype == "fp32-unless-whole"
        and not setup.config.parallel.zero_stage
        and (length != spec.max_position_embeddings or codes or setup.autocast),
        sorts_positions=learned and (tokens if code.counts_positions else length) > EMBEDDING_DIRECT_INDICES,
        sorts_types=spec.encoder is not None and spec.encoder.token_types > 0 and tokens > EMBEDDING_DIRECT_INDICES,
        sorts_distances=spec.encoder is not None
        and spec.encoder.distance_buckets > 0
        and length**2 > EMBEDDING_DIRECT_INDICES,
        all_words=profile.loss in TILED and has_all_words(profile.loss, spec.vocab_size, tokens),
        staged=waits_on_host(spec, setup, tokens),
        copied_widths=copied_widths(spec, setup, tokens, batch),
        delta_chunks=min(ceil_div(length, CHUNK_TOKENS), LATE_CHUNKS + 2) if delta else 0,
        pads_delta=delta and length % CHUNK_TOKENS > 0,
        pads_scan=scanned > 0 and length % scanned > 0,
        one_scan=length <= scanned,
        scan_splits=scan_splits(spec, setup, batch, length),
        sums=sums,
        orders=layer_orders(spec, setup, sums, batch, length) if layers else None,
    )


def _differs_for_one(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether some operation runs otherwise where a micro-batch is one sequence."""
    profile = setup.profile
    return bool(
        "math" in (profile.attention, setup.wide_attention)
        or profile.attention == "eager"
        or profile.loss
        in ("chunked-backward", "chunked-logits", "fused-divergence", "weighted-tokens", *IN_PIECES, *TOKEN_CHUNKS)
        or (setup.copies_logits and (profile.loss == "fp32" or setup.answer_length > 0))
        or setup.stack.loop.labels == "cut"
        or spec.learned_positions
        or spec.state_space is not None
        or spec.linear_attention
        or setup.config.parallel.sequence
        or steps_through_scores(spec, setup)
        or setup.config.compile == "layers"
        or spec.convolves
        or spec.beside
    )
