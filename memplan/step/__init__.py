"""The bytes of a training step at each instant."""
