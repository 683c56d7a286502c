"""A plan as a page: one file with everything in it, or served beside controls."""
