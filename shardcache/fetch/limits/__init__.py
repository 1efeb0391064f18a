"""Limits on connections and bandwidth, and the order in which requests are served within them."""
