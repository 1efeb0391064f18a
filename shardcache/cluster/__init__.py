"""The cluster's tier: a cache of objects that all nodes share; it is an nginx on each node.

The package writes nginx's configuration and the nodes' certificates, runs nginx on a node, and asks
for the state of all nodes. The commands `shardcache cluster` use it. The bytes of shards pass
through nginx alone; the daemon's side is `shardcache.origin.tier`.

A part is a range of an object, the unit that the tier caches. Each part has an owner, one of the
nodes, which alone fetches and caches the part; the others get it from the owner. The front is the
Unix socket at which nginx serves the daemon of its own node.
"""
