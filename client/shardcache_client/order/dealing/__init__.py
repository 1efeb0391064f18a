"""Division of epochs among ranks, workers and batches."""
