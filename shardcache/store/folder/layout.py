"""Layout of the cache folder: paths and file names.

<root>/shards/ab/<key>.tar    a published shard: a plain tar, never written again
<root>/shards/ab/<key>.idx    its sidecar: JSON header and sample index
<root>/partial/<key>.part     a shard being fetched, with <key>.journal for its finished parts
<root>/partial/<key>.tar, .idx    a tar and its sidecar about to be published
<root>/partial/probe          file written and removed again to check the disk
<root>/partial/pins, format   temporary files for <root>/pins and <root>/format
<root>/quarantine/<key>.tar   a corrupt shard, kept for inspection; first to be removed when space is needed
<root>/catalogue/             a diskcache database; may be deleted at any time
<root>/pins                   the pins, one per line
<root>/format                 the format number of the cache folder
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
    """Return the cache key of one version of one shard: a hash of the whole url, not of its last component."""
    return hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()[:KEY_CHARS]


def is_key(name: str) -> bool:
    """Return True if a file's stem has the form of a cache key; other files in the folder are never touched."""
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
        """Folder of unpublished files."""
        return self.root / "partial"

    @property
    def probe(self) -> Path:
        """File written to check that the disk is writable."""
        return self.partial / "probe"

    @property
    def quarantine(self) -> Path:
        """Folder of quarantined shards."""
        return self.root / "quarantine"

    @property
    def catalogue(self) -> Path:
        """Folder of the diskcache database."""
        return self.root / "catalogue"

    @property
    def pins(self) -> Path:
        """File of the pins."""
        return self.root / "pins"

    @property
    def format(self) -> Path:
        """File with the folder's format number."""
        return self.root / "format"

    def bucket(self, key: str) -> Path:
        """Return the folder of a published shard, one of 256 that keep directories short."""
        return self.shards / key[:2]

    def tar(self, key: str) -> Path:
        """Return the path of a published shard."""
        return self.bucket(key) / (key + TAR)

    def sidecar(self, key: str) -> Path:
        """Return the path of a published shard's sidecar."""
        return self.bucket(key) / (key + SIDECAR)

    def in_progress(self, key: str, suffix: str) -> Path:
        """Return the path of one of a shard's unpublished files."""
        return self.partial / (key + suffix)

    def unfinished(self, path: Path) -> Path:
        """Return the path of the temporary file used to replace `path`, one of the folder's own files."""
        return self.partial / path.name

    def folders(self) -> list[Path]:
        """Return every folder that must exist, parents first."""
        buckets = [self.shards / f"{number:02x}" for number in range(256)]
        return [self.root, self.shards, self.partial, self.quarantine, *buckets]
