"""A published shard, and the facts in its sidecar."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcache.errors import CorruptShardError

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a shard in its sidecar's header."""

    url: str
    version: str  # in the origin
    size_bytes: int  # size of the tar in the cache
    origin_bytes: int  # size in the origin; differs if the shard is compressed there
    part_bytes: int  # size of each part but the last
    part_crcs: tuple[int, ...]  # CRC32C of each part of the tar, in order
    samples: int | None  # None for a file, and for a tar fetched as one and not indexed yet

    def to_json(self) -> dict[str, Any]:
        """Return the sidecar's header."""
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, header: dict[str, Any]) -> "Facts":
        """Build from a sidecar's header.

        Raises KeyError, TypeError or ValueError if it is malformed.
        """
        if header["format"] != FORMAT:
            raise ValueError(
                f"it has sidecar format {header['format']!r}; this daemon reads {FORMAT}",
            )
        samples = header["samples"]
        return cls(
            url=str(header["url"]),
            version=str(header["version"]),
            size_bytes=int(header["size_bytes"]),
            origin_bytes=int(header["origin_bytes"]),
            part_bytes=int(header["part_bytes"]),
            part_crcs=tuple(map(int, header["part_crcs"])),
            samples=None if samples is None else int(samples),
        )


@dataclass(frozen=True, slots=True)
class Unpublished:
    """The files of a shard that has passed every check, before they are synced and get their names.

    Their bytes and modes are final. Until they are published, a crash of the machine may lose them.
    """

    tar: Path
    sidecar: Path
    inode: int  # of the tar
    facts: Facts


@dataclass(slots=True, eq=False)
class Shard:
    """One published tar or file with its sidecar.

    The cache's `Residency` alone writes `leases` and `pinned`.
    """

    key: str
    size_bytes: int
    sidecar_bytes: int
    used_at_s: float  # end of its last use, in seconds since the Unix epoch
    use_saved_s: float = 0.0  # end of the last use that was persisted
    leases: int = 0
    pinned: bool = False
    # Its sidecar's header; None after a restart, until it is first needed
    facts: Facts | None = None
    damage: CorruptShardError | None = None  # found in it; readers may still hold leases on it
    suspicion: str = ""  # damage that a reader reported, until it is checked

    @property
    def stays(self) -> bool:
        """True while it must not be evicted."""
        return self.pinned or self.leases > 0

    @property
    def kept_bytes(self) -> int:
        """Size on disk of tar and sidecar together."""
        return self.size_bytes + self.sidecar_bytes
