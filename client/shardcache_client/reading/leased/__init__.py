"""Shards leased from the daemon, read on local disk, also while they arrive."""
