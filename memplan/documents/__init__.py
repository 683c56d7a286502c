"""Files and text: the one way in, the one way out, the one escape."""
