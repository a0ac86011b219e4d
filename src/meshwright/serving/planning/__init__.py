"""Plans serving: what is promised, what steps cost, which split, batch and replicas keep the promise."""
