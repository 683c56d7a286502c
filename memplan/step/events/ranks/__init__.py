"""The events that lie around the parts of a rank's step where several GPUs train together."""
