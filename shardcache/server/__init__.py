"""The daemon on its Unix socket: reading sessions over WebSocket, the admin API over HTTP."""
