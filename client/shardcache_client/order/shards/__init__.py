"""Shards of a dataset, the samples chosen among theirs, and plans to read the shards."""
