"""Decisions about the shards that are written: what they are called, where they end, what is in them."""
