"""Families most of whose layers are linear attention, and the others attention with an output gate."""
