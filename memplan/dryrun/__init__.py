"""A user's own training script, run against a GPU that is not there, on tensors without memory."""
