"""Arguments of datasets, loaders and mixtures."""
