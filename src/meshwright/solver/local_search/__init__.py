"""Anytime search for problems that are too large to close."""
