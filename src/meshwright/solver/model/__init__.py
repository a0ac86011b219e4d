"""The problem in the form in which it is solved: compressed times, half-edges, an order of decisions."""
