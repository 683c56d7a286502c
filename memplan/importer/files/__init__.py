"""Files that hold a job: read into keys or commands, with those that they name."""
