"""State shared between a dataset's processes: epoch, loaded state, and values without a copy."""
