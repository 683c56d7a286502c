"""Commands about trainers' own files."""
