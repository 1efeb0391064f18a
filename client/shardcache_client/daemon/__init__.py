"""Talking to the node's daemon: plans, leases, and going on when it was restarted."""
