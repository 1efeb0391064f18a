"""Trying the stores with the credentials of the process that asks, and findings about what works."""
