"""The dashboard, the daemon's own web page: live progress, waits and upcoming shards of every job."""
