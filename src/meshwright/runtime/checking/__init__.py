"""Compares plans with compiled programs and with a run on one device."""
