"""The alternatives to a plan's choices, and their costs."""
