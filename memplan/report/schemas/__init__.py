"""JSON Schemas of answers, a module for each kind of them."""
