"""Where a reader is, and how it continues."""
