"""Sequences of samples: rounds, permutations, lanes, turns and spans of them."""
