"""The daemon's log and its figures."""
