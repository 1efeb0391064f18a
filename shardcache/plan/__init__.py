"""Prefetch and eviction decisions, without I/O: every session's plan, what to fetch next, what to
evict.
"""
