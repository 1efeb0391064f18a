"""Requests to a cluster's tier, watched, with the object store behind it."""
