"""Position of a reader in its share of an epoch, and its continuation from a state."""
