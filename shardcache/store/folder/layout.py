"""Layout and format of the cache folder.

<root>/shards/ab/<key>.tar    a published shard: a plain tar, or any file, never written again
<root>/shards/ab/<key>.idx    its sidecar: JSON header and sample index
<root>/partial/<key>.part     a shard being fetched, with <key>.journal for its finished parts
<root>/partial/<key>.tar, .idx    a tar and its sidecar about to be published
<root>/partial/probe          a file that is written to check the disk
<root>/partial/pins, format, format.copy    temporary files that replace the files with the same
                              names in <root> once they are complete
<root>/names/ab/<key>/<name>  a link to a published shard, with its object's name
<root>/quarantine/<key>.tar   a corrupt shard, kept for inspection and removed first when space is
                              needed; also an unpublished tar that readers of a killed daemon still
                              have open
<root>/catalogue/             a diskcache database; may be deleted at any time
<root>/pins                   the pins, one per line
<root>/s3-keys                keys of users of the S3 endpoint, for the daemon's user alone
<root>/format                 the format number of the cache folder
<root>/format.copy            the same number; a flipped bit may turn one of the two files into the
                              number of a later release, but hardly both

A key is a hash of a shard's url and version (see `keys`). At the start of the daemon, the names and
sizes of the files are enough to serve shards: only the journals of unfinished files are opened. A
shard's sidecar is read and compared with the file when the shard is first requested. All methods
that access the disk block: call them in a thread.
"""

import contextlib
import re
from pathlib import Path

import structlog

from shardcache.shared.exceptions import CacheFormatError
from shardcache.store.disk.file_operations import replace_file

log = structlog.get_logger()

# A release that changes names or formats in the folder increments this number. An older release
# then refuses the folder, instead of taking every shard in it for damaged.
FORMAT = 1
_UNMARKED = 0  # the number of a folder without its format file
_FORMAT_TEXT = re.compile(r"[0-9]{1,9}\n?")

# Suffixes of a shard's files
TAR = ".tar"
SIDECAR = ".idx"
PART = ".part"
JOURNAL = ".journal"


class Layout:
    """The paths in one cache folder, each as described in the module's docstring."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shards = root / "shards"
        self.partial = root / "partial"
        self.quarantine = root / "quarantine"
        self.names = root / "names"
        self.catalogue = root / "catalogue"
        self.pins = root / "pins"
        self.s3_keys = root / "s3-keys"
        self.format = root / "format"
        self.format_copy = root / "format.copy"
        self.probe = self.partial / "probe"

    def shard_folder(self, key: str) -> Path:
        """Return the folder of a published shard, one of 256 that keep directories short."""
        return self.shards / key[:2]

    def tar(self, key: str) -> Path:
        """Return the path of a published shard."""
        return self.shard_folder(key) / (key + TAR)

    def sidecar(self, key: str) -> Path:
        """Return the path of a published shard's sidecar."""
        return self.shard_folder(key) / (key + SIDECAR)

    def unpublished(self, key: str, suffix: str) -> Path:
        """Return the path of an unpublished file of a shard.

        Args:
            suffix: the kind of file, such as `PART`.
        """
        return self.partial / (key + suffix)

    def replacement_of(self, path: Path) -> Path:
        """Return the path of the temporary file that replaces a file in the root."""
        return self.partial / path.name

    def folders(self) -> list[Path]:
        """Return every folder that must exist, parents first."""
        shard_folders = [self.shards / f"{number:02x}" for number in range(256)]
        return [self.root, self.shards, self.partial, self.quarantine, self.names, *shard_folders]

    def check_format(self) -> None:
        """Raise CacheFormatError if this release cannot use an existing folder. Changes nothing."""
        number = self._read_format()
        # A damaged format file is no error if the folder looks like a cache in other respects:
        # `mark_format` rewrites the file.
        if number is None and not self._is_cache():
            raise CacheFormatError(
                f"{self.format} does not contain a number, so the cache folder's format is unknown",
                remedy="check that the path is a cache folder; if this or an older release wrote "
                "it, remove the file",
            )
        if number is not None and number > FORMAT:
            raise CacheFormatError(
                f"the cache folder {self.root} has format {number}, but this release supports "
                f"formats up to {FORMAT}",
                remedy="start the newer release that wrote it, or give this one another "
                "--cache-dir; to discard the cached shards, remove the folder; if no newer release "
                f"has used it, {self.format} is damaged: remove that file",
            )

    def mark_format(self) -> None:
        """Write this release's format number to a locked folder, unless it has it already."""
        # An error is ignored: cached shards can be served from a disk that cannot be written.
        with contextlib.suppress(OSError):
            is_damaged = self._read_format() is None
            if is_damaged:
                log.warning(
                    "the cache folder's format file is damaged; rewriting it",
                    file=str(self.format),
                )
            # The copy is written first. If a later release is killed between the two writes, only
            # the copy has its number. That alone does not count, so this release can still use the
            # folder.
            for path in (self.format_copy, self.format):
                if _number_in(path) != FORMAT:
                    replace_file(path, self.replacement_of(path), [f"{FORMAT}\n"])

    def _read_format(self) -> int | None:
        """Return the folder's format number; None if the format file is damaged."""
        number = _number_in(self.format)
        if number is None or number <= FORMAT:
            return number
        # A later release has written the number to both files, the copy first. If the copy has a
        # number of this release or an earlier one, the format file is damaged.
        copy_number = _number_in(self.format_copy)
        is_damaged = copy_number is not None and _UNMARKED < copy_number <= FORMAT
        return None if is_damaged else number

    def _is_cache(self) -> bool:
        """Return True if the folder is a cache, judged by its subfolders."""
        return all(folder.is_dir() for folder in (self.shards, self.partial, self.quarantine))


def _number_in(path: Path) -> int | None:
    """Return the number in a file; None for other content, `_UNMARKED` if there is no file."""
    try:
        text = path.read_bytes().decode("ascii", "replace")
    except FileNotFoundError:
        return _UNMARKED
    return int(text) if _FORMAT_TEXT.fullmatch(text) else None
