"""What real runs leave behind, read beside plans and the simulated allocator."""
