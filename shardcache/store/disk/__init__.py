"""Files and memory: errors of the cache disk, checksums, open files, page cache."""
