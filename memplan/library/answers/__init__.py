"""What the library answers: a function for each question, and the value that it returns."""
