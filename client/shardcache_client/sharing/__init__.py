"""State shared between the processes of one dataset: the epoch, a loaded state, and samples passed without a copy."""
