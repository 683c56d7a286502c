"""How optimizer states are stored: floats, or codes in blocks."""
