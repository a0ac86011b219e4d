"""Writes all data of a plan into files."""
