"""What stays between steps, and what the optimizer step takes beyond it."""
