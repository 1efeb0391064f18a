"""HTTP as object stores and web servers share it, and plain web servers."""
