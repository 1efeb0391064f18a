"""Reading of samples from shards on local disk, in the order of a reader's share."""
