"""Several processes: how they connect, agree, share plans and learn of failures."""
