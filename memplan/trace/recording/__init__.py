"""What a step did to memory: every storage, from birth to death, and how that is shown."""
