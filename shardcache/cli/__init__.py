"""The `shardcache` command, one module a command family.

Modules here import only click at the top: rich, aiohttp and pydantic wait until a command needs them, so that
`--help` answers at once.
"""
