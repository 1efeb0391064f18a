"""The cache: its operations (lease, warm, evict, verify, status) and the prefetching that keeps it
filled.
"""
