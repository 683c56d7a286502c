"""A model whose matrices several GPUs share, as one of them has it."""
