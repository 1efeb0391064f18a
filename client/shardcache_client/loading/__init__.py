"""The loader: batches for a torch training loop, made by this process or its workers."""
