"""The cache as its users see it: lease, warm, evict, verify, status; and what keeps it filled."""
