"""Shards being fetched: priorities, prefetch, retries, waiting readers."""
