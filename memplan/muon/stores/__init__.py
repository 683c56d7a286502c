"""Gradients between backward and step, loops over stretches of tensors, and errors."""
