"""A published shard as the daemon knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardcache.errors import CorruptShardError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What a sidecar's header says of its shard.

    Attributes:
        url: where it came from.
        version: the store's version of it.
        size_bytes: size of the tar in the cache.
        origin_bytes: size in the store; differs where the store's copy is compressed.
        part_bytes: piece that one checksum covers.
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
        """Build from a sidecar's header. Raises KeyError, TypeError or ValueError where it is not one of ours."""
        if header["format"] != FORMAT:
            raise ValueError(f"sidecar format {header['format']!r}, this daemon writes {FORMAT}")
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
    """One published file with its sidecar.

    Attributes:
        leases: readers that use it now; it stays while there are any.
        pinned: whether it stays until somebody unpins it.
        used_at_s: end of its last use, seconds since the epoch.
        facts: its sidecar's header; None from a restart until it is first needed.
        damage: what was found wrong with its bytes, whoever still reads them.
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
        """Whether it may not go to make room."""
        return self.pinned or self.leases > 0

    @property
    def kept_bytes(self) -> int:
        """What it takes on disk."""
        return self.size_bytes + self.sidecar_bytes
