"""Where a script's files go: what it writes to a folder that is thrown away, its checkpoints into a few bytes each."""
