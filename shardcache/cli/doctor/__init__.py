"""`shardcache doctor`: checks everything that a daemon and its readers need on a node; one file per check family."""
