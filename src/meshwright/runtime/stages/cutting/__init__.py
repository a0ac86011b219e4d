"""Cuts a traced step into the programs of its stages: which operations each runs, in which pass or round."""
