"""The loader: batches for a torch training loop, made here, by threads or by worker processes."""
