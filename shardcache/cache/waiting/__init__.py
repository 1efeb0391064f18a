"""Waits: of readers for shards, of transfers for space, of tasks for a turn."""
