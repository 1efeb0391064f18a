"""Shards for readers: found in the cache, or transferred into it."""
