"""Programs in Python, read and never run."""
