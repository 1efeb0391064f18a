"""The ways to wait: readers wait for shards, transfers for space, and tasks for a turn."""
