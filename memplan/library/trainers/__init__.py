"""Trainers' own files, as questions about training jobs take them."""
