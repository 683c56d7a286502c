"""Llama and the families that differ from it in a norm, a bias, a window or a fused matrix."""
