"""Formats of shards: how each is recognised, indexed and decoded; standard library only.

Each format is a module with one `Format`, which is listed in `format_table`. A format indexes a
shard into the flat tables of `tarindex.tables`, so that readers of samples never ask which format a
shard has.
The member of a tar's sample corresponds to a cell in formats with columns: a cell is the bytes of
one column of one sample.
"""
