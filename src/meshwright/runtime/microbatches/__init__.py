"""Runs a batch in parts, where that is proven to compute the same."""
