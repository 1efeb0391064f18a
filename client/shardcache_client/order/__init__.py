"""Each reader's samples and their order: a pure function of manifest, seed, epoch and topology.

`shards` has the manifest: the list of a dataset's shards. `sequences` orders samples, `dealing`
divides an epoch among readers, and `mixture` combines several datasets with the help of `sources`.
`rank_epoch` gives the samples of a reader's share, which is all that the reader reads of an epoch,
and the shards that it needs for them.
"""
