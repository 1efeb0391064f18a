"""A published shard, and the facts in its sidecar.

A sidecar is the small file next to a shard's tar. Its header has the facts about the shard; the
rest is the index of the shard's samples. A lease is the promise to a reader that the shard is not
evicted while the reader uses it. A pin is a user's order to keep the shard.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcache.shared.exceptions import CorruptShardError

_SIDECAR_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a shard in its sidecar's header.

    Attributes:
        url: the shard's url, without a signature or another secret.
        version: the shard's version in the origin.
        size_bytes: size of the tar, or file, in the cache.
        origin_bytes: size in the origin, which differs if the shard is compressed there.
        part_bytes: size of each part except the last.
        part_crcs: CRC32C of each part of the tar in the cache, in order.
        samples: number of samples; None for a plain file, and for a tar that was fetched as a plain
            file and is not indexed yet.
    """

    url: str
    version: str
    size_bytes: int
    origin_bytes: int
    part_bytes: int
    part_crcs: tuple[int, ...]
    samples: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the sidecar's header."""
        return {"format": _SIDECAR_FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, header: dict[str, Any]) -> "Facts":
        """Build from a sidecar's header.

        Raises KeyError, TypeError or ValueError if it is malformed.
        """
        format_ = header["format"]
        if format_ != _SIDECAR_FORMAT:
            raise ValueError(
                f"it has sidecar format {format_!r}; this daemon reads {_SIDECAR_FORMAT}",
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
class UnpublishedFiles:
    """The files of a shard that has passed every check and is not published yet.

    Their bytes and modes are final. They are not synced and do not have their final names, so a
    crash of the machine may lose them.

    Attributes:
        tar: path of the tar.
        sidecar: path of the sidecar.
        inode: inode number of the tar.
        facts: the facts in the sidecar.
    """

    tar: Path
    sidecar: Path
    inode: int
    facts: Facts


@dataclass(slots=True, eq=False)
class Shard:
    """One published tar or file with its sidecar.

    Attributes:
        key: cache key of this version of the shard.
        size_bytes: size of the tar or file.
        sidecar_bytes: size of the sidecar.
        used_at_s: end of the shard's last use, in seconds since the Unix epoch.
        use_saved_s: the value of `used_at_s` that was last written to disk; 0 if none was.
        leases: number of leases that readers hold; written by the cache's `Residency` alone.
        pinned: True if a user has pinned the shard; written by the cache's `Residency` alone.
        facts: the facts in the sidecar; None after a restart, until they are first needed.
        damage: the damage that was found in the shard, as an error; None if none was found.
        suspicion: damage that a reader has reported, in words, until it is checked; empty for none.
    """

    key: str
    size_bytes: int
    sidecar_bytes: int
    used_at_s: float
    use_saved_s: float = 0.0
    leases: int = 0
    pinned: bool = False
    facts: Facts | None = None
    damage: CorruptShardError | None = None
    suspicion: str = ""

    @property
    def must_stay(self) -> bool:
        """True while the shard must not be evicted."""
        return self.pinned or self.leases > 0

    @property
    def kept_bytes(self) -> int:
        """Size of the tar and the sidecar together."""
        return self.size_bytes + self.sidecar_bytes
