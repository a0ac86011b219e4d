"""Runs a pipeline: programs of each stage, cut out of the traced step, and the interpreter of their instructions."""
