"""Groups operations that share one choice, and folds layers that repeat."""
