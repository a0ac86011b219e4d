"""Names what a plan amounts to: the kinds of parallelism, in words and notation."""
