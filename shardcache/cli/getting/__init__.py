"""The work of `shardcache get`: files from the cache, put into a folder of the user."""
