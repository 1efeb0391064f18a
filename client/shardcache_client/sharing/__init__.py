"""Between the processes of one dataset: the epoch, what was loaded, and samples that nobody copies."""
