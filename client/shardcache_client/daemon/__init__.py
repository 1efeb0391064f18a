"""Client side of the daemon's protocol: the connection to it, and the choice of a daemon."""
