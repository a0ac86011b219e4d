"""Copies of the last checkpoint in the hosts' memory, which a run that is started again reads if all is there."""
