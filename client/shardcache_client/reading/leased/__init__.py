"""Shards leased from the daemon, and read on local disk, even while they arrive."""
