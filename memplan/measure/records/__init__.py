"""Measurements held against predictions, and kept as records."""
