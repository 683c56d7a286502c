"""Trainers' own files, read into memplan's keys: nothing in them is imported or executed."""
