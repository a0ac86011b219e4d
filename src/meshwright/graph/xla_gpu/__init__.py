"""A model of what XLA's GPU compiler fuses and keeps in memory."""
