"""Knowledge about shards: names and versions, manifests, sample counts."""
