"""LLaMA-Factory's v1 engine, which has a trainer of its own."""
