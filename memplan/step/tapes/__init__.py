"""Linear forms, tapes of operations, and what is alive while a tape is played."""
