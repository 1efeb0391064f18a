"""The cache: its operations (lease, warm, evict, verify, status), and prefetching."""
