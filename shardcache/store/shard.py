"""A published shard and the facts in its sidecar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardcache.errors import CorruptShardError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a shard in its sidecar's header.

    Attributes:
        url: the shard's url.
        version: the shard's version in the origin.
        size_bytes: size of the tar in the cache.
        origin_bytes: size in the origin; differs if the shard is compressed there.
        part_bytes: size of the piece that one checksum covers.
        part_crcs: CRC32C of each piece of the tar, in order.
        samples: number of samples.
    """

    url: str
    version: str
    size_bytes: int
    origin_bytes: int
    part_bytes: int
    part_crcs: tuple[int, ...]
    samples: int

    def to_json(self) -> dict[str, Any]:
        """Return the sidecar's header."""
        return {
            "format": FORMAT,
            "url": self.url,
            "version": self.version,
            "size_bytes": self.size_bytes,
            "origin_bytes": self.origin_bytes,
            "part_bytes": self.part_bytes,
            "part_crcs": list(self.part_crcs),
            "samples": self.samples,
        }

    @classmethod
    def from_json(cls, header: dict[str, Any]) -> Facts:
        """Build from a sidecar's header. Raises KeyError, TypeError or ValueError if it is malformed."""
        if header["format"] != FORMAT:
            raise ValueError(f"it has sidecar format {header['format']!r}; this daemon reads {FORMAT}")
        return cls(
            url=str(header["url"]),
            version=str(header["version"]),
            size_bytes=int(header["size_bytes"]),
            origin_bytes=int(header["origin_bytes"]),
            part_bytes=int(header["part_bytes"]),
            part_crcs=tuple(map(int, header["part_crcs"])),
            samples=int(header["samples"]),
        )


@dataclass(slots=True, eq=False)
class Shard:
    """One published tar with its sidecar. The cache's inventory alone writes `leases` and `pinned`.

    Attributes:
        leases: number of leases on the shard; it cannot be evicted while there are any.
        pinned: True if it cannot be evicted until it is unpinned.
        used_at_s: end of its last use, in seconds since the Unix epoch.
        facts: its sidecar's header; None after a restart, until it is first needed.
        damage: the damage found in it, if any; readers may still hold leases on it.
    """

    key: str
    size_bytes: int
    sidecar_bytes: int
    used_at_s: float
    leases: int = 0
    pinned: bool = False
    facts: Facts | None = None
    damage: CorruptShardError | None = None

    @property
    def stays(self) -> bool:
        """True if it must not be evicted."""
        return self.pinned or self.leases > 0

    @property
    def kept_bytes(self) -> int:
        """Size on disk of tar and sidecar together."""
        return self.size_bytes + self.sidecar_bytes
