"""Indexing of shards in processes of their own."""
