"""Plans as data: what was decided, predicted and recorded. Nothing here plans or needs JAX."""
