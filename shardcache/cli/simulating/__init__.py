"""`shardcache simulate`: training runs without data, by whole shards and by ranges of them."""
