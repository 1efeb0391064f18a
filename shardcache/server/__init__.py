"""The daemon's server on its Unix socket: readers' sessions over WebSocket, the admin API over HTTP."""
