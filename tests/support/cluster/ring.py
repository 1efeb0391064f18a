"""Consistent hashing as nginx does it (`hash … consistent`): which node of a tier owns which part."""

import struct
from collections.abc import Iterable
from urllib.parse import urlsplit
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from shardcache.cluster.tier import Tier

_POINTS = 160


def key_of(url: str, start: int, size_bytes: int) -> str:
    """Return the key by which the tier finds the owner of a part: host and path as sent, and its range."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}bytes={start}-{start + size_bytes - 1}"


class Ring:
    """The ring of a tier.

    nginx and Cache::Memcached::Fast agree on it: 160 points per node and weight, each the CRC-32 of the node's address
    and of the point before it; the owner of a key is the node of the first point that is not below the key's CRC-32.
    """

    def __init__(self, tier: Tier) -> None:
        self.addresses = [node.at(tier.owner_port) for node in tier.nodes]
        order = sorted(range(len(self.addresses)), key=self.addresses.__getitem__)  # of two with one point, the first
        count = _POINTS * tier.weight
        points = np.concatenate([_points(self.addresses[node], count) for node in order])
        sorting = np.argsort(points, kind="stable")
        self._points = points[sorting]
        self._owners = np.repeat(np.array(order), count)[sorting]

    def owners(self, keys: Iterable[str]) -> NDArray[np.int64]:
        """Return the number of the node, in the order of the list, that owns each key."""
        hashes = np.fromiter((crc32(key.encode()) for key in keys), np.uint32)
        return self._owners[np.searchsorted(self._points, hashes) % len(self._points)]

    def address(self, key: str) -> str:
        """Return the address of the node that owns a key."""
        return str(self.addresses[self.owners([key])[0]])

    def loads(self, keys: Iterable[str]) -> NDArray[np.float64]:
        """Return the number of keys that each node owns, over the mean."""
        counted = np.bincount(self.owners(keys), minlength=len(self.addresses)).astype(np.float64)
        return np.asarray(counted / counted.mean())


def _points(address: str, count: int) -> NDArray[np.uint32]:
    host, _, port = address.rpartition(":")
    seed, point, points = crc32(f"{host}\0{port}".encode()), 0, []
    for _ in range(count):
        point = crc32(struct.pack("<I", point), seed)
        points.append(point)
    return np.array(points, np.uint32)
