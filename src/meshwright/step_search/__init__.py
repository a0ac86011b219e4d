"""Decides what one plan of one program leaves open: into how many microbatches the batch is cut."""
