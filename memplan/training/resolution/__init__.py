"""From a training config to a setup: its names looked up, its gaps filled in by its stack, its contradictions refused."""
