"""Tapes played: what is alive at each moment of forward, of what is computed again, and of backward."""
