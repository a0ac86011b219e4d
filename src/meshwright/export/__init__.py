"""Writes everything that is known of a plan into files."""
