"""Compares clusters by simulation."""
