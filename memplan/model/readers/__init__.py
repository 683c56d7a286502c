"""Outside files to values: released models' configs, and shapes given on the command line."""
