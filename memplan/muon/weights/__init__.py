"""Weights that are codes, and how they are updated in place."""
