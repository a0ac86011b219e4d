"""Reads what Alpa dumps of its own plans."""
