"""Shards on disk: reserving space, publishing, evicting, pinning, checking."""
