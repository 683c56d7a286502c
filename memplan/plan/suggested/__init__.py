"""What to change in a job that is not sure to fit."""
