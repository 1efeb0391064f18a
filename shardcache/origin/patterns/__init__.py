"""Patterns of urls: braces, globs, prefixes and index files, and the shards they stand for."""
