"""The DataLoader around a dataset: what torch does not tell a dataset about it, and the memory of its workers."""
