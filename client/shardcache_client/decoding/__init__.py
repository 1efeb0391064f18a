"""From a shard's bytes to what the training loop gets: choice of members, decoders, and the dataset's own functions."""
