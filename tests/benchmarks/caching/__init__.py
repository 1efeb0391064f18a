"""Benchmarks of what is fetched: shared caches and eviction."""
