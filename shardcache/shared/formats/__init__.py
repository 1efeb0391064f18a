"""Formats of shards: how each is recognised, indexed and decoded; standard library only.

Each format is a module with one `Format`, which is listed in `format_table`. All formats are
indexed into the same flat tables (`tarindex.tables`), so that readers of samples never ask which
format a shard has. Where a tar has the members of a sample, other formats have cells: a cell is the
bytes of one column of one sample.
"""
