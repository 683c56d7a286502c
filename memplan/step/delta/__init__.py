"""Gated delta networks on a tape: the layer, and its rule as each library computes it."""
