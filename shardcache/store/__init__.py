"""The cache folder: partial, verified and published shards, and their recovery after a restart."""
