"""Views of the cache: the status page, and what open dashboard pages show beyond it."""
