"""Reads a solved problem back as a plan and a record of the search."""
