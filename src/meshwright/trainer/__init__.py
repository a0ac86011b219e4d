"""A training run from settings: data, model, optimizer, metrics and the loop, made of the public pieces."""
