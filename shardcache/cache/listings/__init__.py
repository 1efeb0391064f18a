"""Lists of the shards that users' patterns match."""
