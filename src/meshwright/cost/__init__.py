"""Costs: seconds of compute, bytes of memory."""
