"""Newton-Schulz iterations and the matrix products in them."""
