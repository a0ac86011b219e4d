"""Names the kinds of parallelism of a plan, in words and notation."""
