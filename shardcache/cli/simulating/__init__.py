"""`shardcache simulate`: training runs without data, which read whole shards or ranges of them."""
