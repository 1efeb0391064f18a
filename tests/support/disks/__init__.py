"""Disks, mounts and files that a test may break."""
