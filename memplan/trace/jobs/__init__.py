"""Training jobs to trace or to measure: what a step is given, how it keeps gradients, which optimizer updates."""
