"""The daemon's view of the tier: nginx on each node of a cluster, in front of the origins.

A request to the tier is the same as the request to the origin, including its signature, but it is
sent to this node's nginx. The daemon does not trust the tier. If a request to the tier fails, it is
sent to the origin. If bytes from the tier turn out to be damaged, they are requested again past the
tier's cache, and the tier replaces its copy. The owner of a part is the node whose nginx caches the
part.
"""
