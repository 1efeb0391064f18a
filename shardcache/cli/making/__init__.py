"""Commands that make shards, indexes and tables of samples."""
