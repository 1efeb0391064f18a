"""The daemon's process: its takeover, its load, its service manager and its end."""
