"""Parts of a dataset: its shards, samples and epochs, and the program that reads them."""
