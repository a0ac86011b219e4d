"""Compares clusters by planning and simulating on each."""
