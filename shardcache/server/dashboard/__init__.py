"""The daemon's own page: what every job does, whether it waits, and what comes next, live in a browser."""
