"""Consistent hashing as nginx does it (`hash … consistent`): which node owns which part."""

import struct
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from shardcache.cluster.tier_config import Tier

_POINTS = 160


def key_of(url: str, start: int, size_bytes: int) -> str:
    """Return the key that leads to a part's owner: host and path as sent, and range."""
    parts = urlsplit(url)
    return f"{parts.netloc}{parts.path}bytes={start}-{start + size_bytes - 1}"


class Ring:
    """160 points per node and weight, each the CRC-32 of the address and the last point.

    The owner of a key is the node of the first point that is not below the key's CRC-32.
    """

    def __init__(self, tier: Tier) -> None:
        self.addresses = sorted(node.at(tier.owner_port) for node in tier.nodes)
        points = [
            point for address in self.addresses for point in _points(address, _POINTS * tier.weight)
        ]
        # Of two with the same point, the first has it.
        order = np.argsort(np.array(points, np.uint32), kind="stable")
        self._points = np.array(points, np.uint32)[order]
        self._owners = order // (_POINTS * tier.weight)

    def owners(self, keys: Iterable[str]) -> NDArray[np.int64]:
        """Return the place in `addresses` of the node that owns each key."""
        hashes = np.fromiter((crc32(key.encode()) for key in keys), np.uint32)
        return np.asarray(self._owners[np.searchsorted(self._points, hashes) % len(self._points)])

    def loads(self, keys: Iterable[str]) -> NDArray[np.float64]:
        """Return the number of keys that each node owns, over the mean."""
        counted = np.bincount(self.owners(keys), minlength=len(self.addresses))
        return np.asarray(counted / counted.mean())


def _points(address: str, count: int) -> Iterator[int]:
    host, _, port = address.rpartition(":")
    seed = crc32(f"{host}\0{port}".encode())
    point = 0
    for _ in range(count):
        point = crc32(struct.pack("<I", point), seed)
        yield point
