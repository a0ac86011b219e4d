"""Cuts a model into layers that stages can be made of."""
