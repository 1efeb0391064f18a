"""Lists of shards: index files, as users keep them, and columns, as messages carry them."""
