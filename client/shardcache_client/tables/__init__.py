"""Tables whose rows join the samples of shards by key: a manifest, captions, labels, scores."""
