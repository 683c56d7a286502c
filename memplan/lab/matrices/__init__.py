"""Experiments on matrices, without a model."""
