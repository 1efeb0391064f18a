"""The daemon's server on its Unix socket: readers' sessions, and the admin API over HTTP."""
