"""Answers about one job or several: tables, pictures and JSON of memory plans."""
