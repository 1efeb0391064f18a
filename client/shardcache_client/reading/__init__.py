"""From shards on local disk to samples, in the order of a reader's share."""
