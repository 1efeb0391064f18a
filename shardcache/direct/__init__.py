"""Shards read directly from the origin by one process, without a daemon: implements `fallback="direct"`."""
