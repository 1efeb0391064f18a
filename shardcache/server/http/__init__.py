"""The admin API over HTTP, on the Unix socket and over TCP."""
