"""Families with LayerNorm and biases, most of them with attention and feed-forward in parallel."""
