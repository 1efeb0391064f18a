"""One shard's download: parts, limits, retries, checks."""
