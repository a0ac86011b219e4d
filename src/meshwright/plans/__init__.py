"""Plans as data: decisions, predictions and records. Nothing here plans or needs JAX."""
