"""Connected readers: their jobs, plans, leases and waits."""
