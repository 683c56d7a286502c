"""Commands whose answer is a page."""
