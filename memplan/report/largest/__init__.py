"""Answers about the largest that fits."""
