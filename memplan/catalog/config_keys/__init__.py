"""Sections of a training config: every key of each, with its default."""
