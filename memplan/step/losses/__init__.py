"""Losses on a tape: cross-entropy in the ways that libraries form it, and what preference methods compare."""
