"""Shards straight from the store, for one process and without a daemon: what `fallback="direct"` reads."""
