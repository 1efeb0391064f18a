"""The `shardcache` command line, one module per command family.

At the top level, modules here import only click: rich, aiohttp and pydantic are imported when a command needs them, so
that `--help` is fast.
"""
