"""Training steps run by the libraries that people train with, on tensors without memory."""
