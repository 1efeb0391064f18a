"""Files: errors of the cache disk, checksums, open files."""
