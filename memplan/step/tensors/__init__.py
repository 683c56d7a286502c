"""One parameter tensor: what training stores for it, and what updates it."""
