"""fsspec filesystems: local files, and all others that have no module of their own."""
