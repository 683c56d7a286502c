"""The allocations and frees of a training step, in order, as tapes and updates tell them."""
