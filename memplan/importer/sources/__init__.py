"""Given files and command lines, read into keys and values with their lines; nothing is imported or executed."""
