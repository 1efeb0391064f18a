"""Samples: sliced from mapped shards, reduced to the wanted members, and decoded."""
