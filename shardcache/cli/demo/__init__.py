"""`shardcache demo`: two training jobs on one cache, and a check of what they read."""
