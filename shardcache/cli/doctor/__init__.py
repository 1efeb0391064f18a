"""`shardcache doctor`: checks everything that a daemon and its readers need on a node.

One file per check family.
"""
