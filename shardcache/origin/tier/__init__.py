"""The daemon's view of the tier: nginx on each node of a cluster, in front of the origins.

A request to the tier is the request to the origin, signature included, sent over a connection to
this node's nginx. No answer of the tier is trusted: where it fails, the origin is requested, and
bytes that turn out to be damaged are requested again past its cache, which replaces them there.
"""
