"""Sequences of samples that are read from several orders in turn: mixtures of datasets, and global batches. Pure."""
