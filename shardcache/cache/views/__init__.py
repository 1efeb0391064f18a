"""Live views for the dashboard: waiting readers, needs of the next minutes, and a map of the cached shards."""
