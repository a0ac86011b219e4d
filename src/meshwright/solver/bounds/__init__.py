"""Lower bounds: dual ascent over costs and memory prices."""
