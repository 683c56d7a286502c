"""Answers that are made of many plans: of several configs, GPUs, sizes or settings."""
