"""What a program calls: names looked up, jobs planned, answers as values."""
