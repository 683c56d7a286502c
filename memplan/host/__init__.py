"""The machine at hand: its NVIDIA driver, its GPUs, and what its torch says on import."""
