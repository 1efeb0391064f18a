"""Files on disk: partial, verified, published; found again after a restart."""
