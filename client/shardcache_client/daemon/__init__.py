"""Client side of the daemon's protocol: plans, leases, and recovery from a restart of the daemon."""
