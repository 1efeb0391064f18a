"""Indexing of shards, that is, listing their samples, in processes of their own."""
