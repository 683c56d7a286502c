"""Answers about how several GPUs share a job."""
