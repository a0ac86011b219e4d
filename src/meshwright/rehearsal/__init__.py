"""Runs one device's share of a plan on one device: measured compute and memory of a cluster that need not be there."""
