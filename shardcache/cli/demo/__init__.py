"""`shardcache demo`: the complete system on one machine, without external services.

`train.py` is the user's part; everything else here sets up the environment around it and checks the outcome.
"""
