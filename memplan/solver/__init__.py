"""Largest values and suggested settings, each solved over many plans."""
