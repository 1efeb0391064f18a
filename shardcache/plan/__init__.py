"""Prefetch and eviction decisions, without I/O: what to fetch next, what to evict."""
