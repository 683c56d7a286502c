"""What CUDA would do, done on tensors without memory: its autocast, its choice of attention kernels, its composite paths."""
