"""Looking up names for whoever must not reach what only this node reaches."""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

from shardcache.errors import NotAllowedError
from shardcache.origin.addresses import is_near


class FarResolver(AbstractResolver):
    """Looks names up, and refuses those that are far by their name and near by their address.

    The addresses that are judged are those that are connected to: a name that changes in between gains nothing.
    """

    def __init__(self, resolver: AbstractResolver | None = None) -> None:
        self._resolver = resolver or DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises NotAllowedError, OSError."""
        found = await self._resolver.resolve(host, port, family)
        near = [result["host"] for result in found if is_near(result["host"])]
        if near and not is_near(host):
            raise NotAllowedError(
                f"the name {host} leads to {near[0]}, which is this node or its cloud's metadata service",
                remedy="if that is meant, have the node's operator add the url's prefix to --allow",
            )
        return found

    async def close(self) -> None:
        """Close the resolver within."""
        await self._resolver.close()
