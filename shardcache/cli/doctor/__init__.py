"""`shardcache doctor`: looks at all that a daemon and its readers need of a node; one file a family of checks."""
