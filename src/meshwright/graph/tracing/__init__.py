"""From a Python function to a flat graph of operations."""
