"""Answers as one screen of a terminal: the verdict first, then bars; the rest of each answer is under ``-v``."""
