"""Families whose rotary positions turn neighbouring dimensions of a head, and not its halves."""
