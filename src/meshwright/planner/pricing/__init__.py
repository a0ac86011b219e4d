"""Prices every strategy of every group: compute, communication, memory."""
