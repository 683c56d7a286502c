"""A pipeline's ranks: which layers they have, in what order micro-batches pass them, and what a step takes of memory there."""
