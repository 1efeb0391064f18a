"""What waits, and for what: readers for shards, transfers for space, tasks for a turn."""
