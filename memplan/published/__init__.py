"""The tables of the notes: as printed, recomputed by their own rules, and what memplan holds true."""
