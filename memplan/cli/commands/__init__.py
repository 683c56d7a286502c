"""Commands that need no torch."""
