"""Versions of shards: the last version fetched of each, and checks that it is still the latest."""
