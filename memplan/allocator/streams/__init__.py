"""Long streams of numbered allocations, played quickly."""
