"""Requests to a cluster's tier, and the watch over them.

A tier is a cache that the nodes of a cluster share, in front of the object store.
"""
