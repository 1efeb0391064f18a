"""Tar shards, datasets, and cache folders with shards in them."""
