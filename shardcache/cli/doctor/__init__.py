"""`shardcache doctor`: checks everything that a daemon and its readers need on a node.

A check is a function that returns findings, the lines of the report. The files `*_checks.py` have
the checks, by subject; `runner` calls the checks in order.
"""
