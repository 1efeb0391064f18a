"""The cluster's tier: nginx on each node as a cache that all nodes share, before the object stores.

The package writes its configuration and its certificates, runs it on a node, and reads its state.
The bytes pass through nginx alone; `shardcache.origin.tier` is the daemon's side.
"""
