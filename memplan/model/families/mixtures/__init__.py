"""Families with routed experts."""
