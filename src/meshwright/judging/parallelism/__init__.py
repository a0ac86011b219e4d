"""Names the kinds of parallelism that a plan amounts to."""
