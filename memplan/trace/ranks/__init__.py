"""One GPU of several: torch's own data parallelism around a model, on a process group that sends nothing."""
