"""The disk under the cache folder: its errors, file operations, open files and mounts."""
