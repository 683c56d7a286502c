"""Which settings to use: the space of settings, bounds on their bytes and times, and the Pareto front."""
