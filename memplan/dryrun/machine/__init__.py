"""A machine with the pretended GPU: its tensors, its runtime, its files."""
