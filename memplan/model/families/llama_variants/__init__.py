"""Families with Llama's layers but for a factor, a norm, or another feed-forward part."""
