"""Consistent hashing as nginx does it (`hash … consistent`): which node owns which shard. Pure.

nginx and Cache::Memcached::Fast agree on this ring: 160 points per node, each the CRC-32 of the node's address and of
the point before it; the owner of a key is the node of the first point that is not below the key's CRC-32.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from urllib.parse import urlsplit
from zlib import crc32

_POINTS = 160
_SPACE = 1 << 32


def key_of(url: str) -> str:
    """Return the key under which the tier looks for the owner of a shard: the url's host and path, as requested.

    Args:
        url: http(s) url as it is requested from the object store, percent-encoded; its query does not matter.
    """
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


class Ring:
    """Ring of the nodes of a cluster.

    Args:
        addresses: HOST:PORT of each node, as in nginx.conf. Their order does not matter.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        found = sorted((point, address) for address in addresses for point in _points(address))
        self._owners = dict(reversed(found))  # of two nodes with the same point, the first has it
        self._points = sorted(self._owners)

    def owner(self, key: str) -> str:
        """Return the address of the node that owns a key."""
        return self._owners[self._points[self._following(crc32(key.encode()))]]

    def owners(self, key: str) -> list[str]:
        """Return all addresses, the owner first, then in the order in which they take over from it."""
        start = self._following(crc32(key.encode()))
        return list(dict.fromkeys(self._owners[point] for point in self._points[start:] + self._points[:start]))

    def shares(self) -> dict[str, float]:
        """Return the share of all keys that each node owns."""
        shares = dict.fromkeys(self._owners.values(), 0.0)
        before = self._points[-1] - _SPACE
        for point in self._points:
            shares[self._owners[point]] += (point - before) / _SPACE
            before = point
        return shares

    def _following(self, value: int) -> int:
        return bisect_left(self._points, value) % len(self._points)


def _points(address: str) -> list[int]:
    host, _, port = address.rpartition(":")
    seed = crc32(b"\0".join((host.encode(), port.encode())))
    points, before = [], 0
    for _ in range(_POINTS):
        before = crc32(struct.pack("<I", before), seed)
        points.append(before)
    return points
