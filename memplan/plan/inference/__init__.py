"""Serving a model: weights, a cache of keys and values, and one forward without gradients."""
