"""The index of a tar shard: its samples and the offsets of their members.

A member is a file in the tar; a sample is a group of members with the same key. The index is built
once, when the shard arrives. `grouping.index_tar` walks the tar's headers (`members`) and groups
the members into samples by WebDataset's rules; `tables.write` saves the result to a sidecar file,
which lies next to the shard in the cache. A reader opens the sidecar as a `TarIndex` and slices
samples out of the shard without parsing tar. For a shard that is still arriving, `Tar` and
`Grouping` give the samples fetched so far.
"""
