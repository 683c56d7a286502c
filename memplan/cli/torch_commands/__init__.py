"""Commands that need torch."""
