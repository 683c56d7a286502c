"""What passes between the processes of a dry run, and between its parts."""
