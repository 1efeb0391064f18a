"""`shardcache doctor`: checks everything that a daemon and its readers need on a node.

Each family of checks has a file. A check is a function that returns findings, the lines of the
report; `runner` calls the checks in order.
"""
