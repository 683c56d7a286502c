"""The Gemma generations."""
