"""The daemon's process: sockets, service manager, liveness, shutdown."""
