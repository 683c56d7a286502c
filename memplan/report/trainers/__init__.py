"""Answers about trainers' own files."""
