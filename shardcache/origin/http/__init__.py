"""Plain web servers."""
