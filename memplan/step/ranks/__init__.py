"""A training step of one rank of several that hold shards."""
