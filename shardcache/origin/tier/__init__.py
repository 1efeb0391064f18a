"""The daemon's view of the tier: nginx on each node of a cluster, in front of the origins.

A request to it is the request to the origin, signature included, sent over a connection to this
node's nginx. Nothing that it answers is trusted: the origin is requested where the tier fails, and
bytes that turn out damaged are fetched past its cache, which repairs it.
"""
