"""The cache's space: which shards are kept, which are evicted, and what ends a deadlock."""
