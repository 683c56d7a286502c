"""A model over a grid of GPUs: degrees of parallelism, what each rank holds of the parameters, and its states."""
