"""A job over a grid of GPUs against one of them."""
