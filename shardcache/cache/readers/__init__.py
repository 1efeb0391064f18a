"""Reading processes: their sessions, leases and jobs."""
