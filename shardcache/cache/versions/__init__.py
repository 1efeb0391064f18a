"""Versions of shards: the last ones fetched, and whether they are still present."""
