"""How GPUs may share a job: every layout that can be planned, what it sends over which links, and the front of time and memory."""
