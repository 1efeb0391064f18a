"""Limits on connections and bandwidth, and who is served first within them."""
