"""Answers as pictures, drawn by matplotlib in one look."""
