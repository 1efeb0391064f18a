"""`shardcache demo`: the whole product on one machine, with nothing from outside.

`train.py` is what a user writes; everything else here only builds the world around it and checks what came out.
"""
