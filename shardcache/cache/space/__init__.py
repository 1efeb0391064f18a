"""The cache's space: the shards that are kept, those that are evicted, and the end of deadlocks."""
