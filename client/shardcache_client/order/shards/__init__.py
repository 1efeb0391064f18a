"""Shards of a dataset, the samples chosen of them, and plans to read them."""
