"""The CUDA caching allocator, simulated without torch, and memory histories of real runs to hold it against."""
