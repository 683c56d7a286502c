"""What ranks gather, reduce and send each other."""
