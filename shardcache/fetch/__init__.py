"""Downloads of shards: connections, parts, retries, limits and checks."""
