"""What the backward pass of a step computes again: a pass over its program."""
