"""Division of epochs among ranks, workers and batches: each reader gets a share of the epoch."""
