"""A model of which operations XLA's GPU compiler fuses, and which values it keeps in memory."""
