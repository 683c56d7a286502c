"""What the allocator holds beyond what it hands out: simulated for an answer that is shown, a share in searches."""
