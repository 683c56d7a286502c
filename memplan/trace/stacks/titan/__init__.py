"""torchtitan: its models, its trainer, and its pipelines."""
