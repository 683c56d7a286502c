"""Experiments behind the tables of the notes, each a function from settings and seeds to a record."""
