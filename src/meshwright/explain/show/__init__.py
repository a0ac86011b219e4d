"""Plans, tensors and programs as text."""
