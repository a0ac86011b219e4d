"""Runs a batch in parts, where that is proven to give the same results."""
