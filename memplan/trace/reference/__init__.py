"""The reference decoder, part by part, with the memory behaviour of each kernel."""
