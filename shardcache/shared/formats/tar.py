"""Tar, the format that `shardcache write` makes.

The samples of a tar are found by `tarindex`. A tar can be read while it is still arriving:
`TarWalk` indexes it member by member.
"""

from pathlib import Path

from shardcache.shared.exceptions import NotATarError
from shardcache.shared.formats.files import opened
from shardcache.shared.formats.foreign import explained
from shardcache.shared.formats.format import Format, IndexOptions, Walk
from shardcache.shared.tarindex.grouping import Adjacency, Grouping, index_tar, splitter_of
from shardcache.shared.tarindex.members import Read, Tar
from shardcache.shared.tarindex.packed_lines import split_lines
from shardcache.shared.tarindex.tables import Samples


class TarFormat(Format):
    """Tar, plain or compressed as a whole."""

    name = "tar"
    suffixes = {  # noqa: RUF012  # a Mapping
        ".tar": None,
        ".tar.gz": "gzip",
        ".tgz": "gzip",
        ".tar.zst": "zstd",
        ".tar.zstd": "zstd",
        ".tzst": "zstd",
        ".tzstd": "zstd",
        ".tar.bz2": "bzip2",
        ".tbz2": "bzip2",
        ".tbz": "bzip2",
        ".tb2": "bzip2",
        ".tar.xz": "xz",
        ".txz": "xz",
        ".tar.lz4": "lz4",
    }
    can_walk_early = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """Walk a tar to its end. Blocks. Raises as `index_tar`."""
        try:
            return index_tar(
                path,
                url,
                require_end=options.require_end,
                ignore_trailing_data=options.ignore_trailing_data,
                require_adjacent=options.require_adjacent,
            )
        except NotATarError as exn:
            with opened(path) as (read, _):
                raise explained(exn, read) from None

    def walk(self, read: Read, size_bytes: int, url: str) -> Walk:
        """Return the walk over a tar that is still arriving."""
        return TarWalk(read, size_bytes, url)


class TarWalk:
    """The samples of a tar as far as it has arrived; see `Walk`.

    `advance` raises TornSampleError at the second part of a sample whose members are not adjacent.
    The first part may then already have been read as a sample.
    """

    def __init__(self, read: Read, size_bytes: int, url: str) -> None:
        # The daemon checks the end of the tar once the whole shard has arrived.
        tar = Tar(read, size_bytes, url, require_end=False, ignore_trailing_data=True)
        self._url = url
        self._read = read
        self._members = split_lines(tar, read, url)
        self._grouping = Grouping(splitter_of(url))
        self.samples = self._grouping.samples
        self._adjacency = Adjacency(self.samples)

    def advance(self) -> bool:
        """Add the next member; return False at the end of the tar."""
        try:
            member = next(self._members, None)
        except NotATarError as exn:
            raise explained(exn, self._read) from None
        if member is None:
            return False
        self._grouping.add((member,))
        self._adjacency.check(self._url)
        return True


TAR = TarFormat()
