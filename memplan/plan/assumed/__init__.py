"""What a plan takes for granted, in sentences."""
