"""Checks of a download against the origin's checksums and ETags."""
