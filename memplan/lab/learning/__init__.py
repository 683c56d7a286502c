"""Experiments that train: each a function from settings and seeds to a record."""
