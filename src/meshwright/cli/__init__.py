"""The command line: one file per group of commands."""

from meshwright.cli.app import main

__all__ = ["main"]
