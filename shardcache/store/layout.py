"""Where things lie in the cache folder, and how they are named.

<root>/shards/ab/<key>.tar    a published shard: a plain tar, never written again
<root>/shards/ab/<key>.idx    its sidecar: JSON header and sample index
<root>/partial/<key>.part     a shard that is arriving, with <key>.journal for its finished parts
<root>/partial/<key>.tar, .idx    on their way to being published
<root>/partial/probe          written and removed again to find out if the disk is well
<root>/partial/pins, format   on their way to their places
<root>/quarantine/<key>.tar   found damaged; kept for a look, first to go when space is needed
<root>/catalogue/             diskcache; may be deleted at any time
<root>/pins                   what is pinned, a line each
<root>/format                 the number of the format that all of this has
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

KEY_CHARS = 32
TAR = ".tar"
SIDECAR = ".idx"
PART = ".part"
JOURNAL = ".journal"


def shard_key(url: str, version: str) -> str:
    """Return the name of one version of one shard: from the whole url, never from its last component."""
    return hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()[:KEY_CHARS]


def is_key(name: str) -> bool:
    """Whether a file's stem is a name that this cache gave; nothing else in the folder is ever touched."""
    return len(name) == KEY_CHARS and all(char in "0123456789abcdef" for char in name)


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths below one cache folder."""

    root: Path

    @property
    def shards(self) -> Path:
        """Folder of the published shards."""
        return self.root / "shards"

    @property
    def partial(self) -> Path:
        """Folder of what is not yet published."""
        return self.root / "partial"

    @property
    def probe(self) -> Path:
        """File that shows if the disk takes bytes."""
        return self.partial / "probe"

    @property
    def quarantine(self) -> Path:
        """Folder of damaged shards."""
        return self.root / "quarantine"

    @property
    def catalogue(self) -> Path:
        """Folder of the diskcache."""
        return self.root / "catalogue"

    @property
    def pins(self) -> Path:
        """File of what is pinned."""
        return self.root / "pins"

    @property
    def format(self) -> Path:
        """File that tells the format of the folder."""
        return self.root / "format"

    def bucket(self, key: str) -> Path:
        """Folder of one published shard; 256 of them keep directories short."""
        return self.shards / key[:2]

    def tar(self, key: str) -> Path:
        """Path of a published shard."""
        return self.bucket(key) / (key + TAR)

    def sidecar(self, key: str) -> Path:
        """Path of a published shard's sidecar."""
        return self.bucket(key) / (key + SIDECAR)

    def in_progress(self, key: str, suffix: str) -> Path:
        """Path of one of a shard's unpublished files."""
        return self.partial / (key + suffix)

    def unfinished(self, path: Path) -> Path:
        """Path at which the next content of one of the folder's own files is written."""
        return self.partial / path.name

    def folders(self) -> list[Path]:
        """Every folder that must exist, parents first."""
        buckets = [self.shards / f"{number:02x}" for number in range(256)]
        return [self.root, self.shards, self.partial, self.quarantine, *buckets]
