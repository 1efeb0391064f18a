"""The `shardcache` command line, a module or a room per command family.

A room is a subpackage, such as `doctor`. The commands' modules import only click at their top
level. rich, aiohttp and pydantic are imported inside functions, when a command needs them, so that
`--help` and short requests to the daemon are fast.
"""
