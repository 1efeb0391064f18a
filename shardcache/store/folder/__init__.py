"""The cache folder: format, layout, lock, recovery."""
