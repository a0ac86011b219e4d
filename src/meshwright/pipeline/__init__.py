"""Pipeline: the second level of a plan; the model cut into stages, each on a submesh of its own."""
