"""What is gathered together as one flat tensor."""
