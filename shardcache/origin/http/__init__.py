"""HTTP for object stores and web servers, and the origin of plain web servers."""
