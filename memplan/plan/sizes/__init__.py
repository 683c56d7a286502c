"""What a device has room for: the largest model, and the fewest devices."""
