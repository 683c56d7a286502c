"""A training step as DeepSpeed's engine runs it on one rank, and parts cut where something happens beside their operations."""
