"""Several processes: how they meet, agree, share plans and hear of failures."""
