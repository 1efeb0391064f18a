"""Decisions without I/O: what every session will read, what to fetch next, what to evict."""
