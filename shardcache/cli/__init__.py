"""The `shardcache` command line, a module or a room per command family.

At the top level, the commands' modules import only click: rich, aiohttp and pydantic are imported
when a command needs them, so that `--help` and short requests to the daemon are fast.
"""
