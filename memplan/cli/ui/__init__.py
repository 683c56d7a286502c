"""A plan beside controls, served on this machine to its own browser."""
