"""Pipeline: the second level of a plan; the model is cut into stages, each on its own submesh."""
