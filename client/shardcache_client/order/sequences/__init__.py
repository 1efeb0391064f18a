"""Orders of samples: endless rounds of shards, permutations, lanes that take turns, and spans."""
