"""The work of `shardcache get`: files from the cache in a folder."""
