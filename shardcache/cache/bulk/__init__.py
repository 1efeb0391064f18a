"""Requests of users for whole lists of shards: to warm, count, list, evict or verify them."""
