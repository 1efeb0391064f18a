"""Sources of a mixture: their turns in each epoch, and the order of their samples after changes."""
