"""Formats of shards: how each is recognised, indexed and decoded; standard library only.

Each format is a module with one `Format`, and a row of `table`. It indexes a shard into the flat
tables of `tarindex.tables`, so readers of samples never ask which format a shard has.
"""
