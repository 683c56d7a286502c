"""What a running script does: its steps, its tensors, and the allocator under them."""
