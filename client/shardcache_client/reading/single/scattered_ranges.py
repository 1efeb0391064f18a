"""Ranges of scattered samples, which are read one by one and not shard by shard.

Samples are scattered if their dataset has `shuffle="global"`. Each is fetched by the range of its
bytes in the tar. A mixture reads from several datasets, its sources, and some of them may be
scattered.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.urls.url_names import compression_of
from shardcache_client.reading.single.sample_ranges import SampleRange, SampleRanges
from shardcache_client.reading.single.table_rows import TABLES_REMEDY


class ScatteredSource(NamedTuple):
    """A dataset whose samples are scattered, alone or as a source of a mixture.

    Attributes:
        first_shard: number of its first shard in the manifest.
        ranges: ranges of its samples. In them, shards are numbered within the source.
    """

    first_shard: int
    ranges: SampleRanges


class ScatteredRanges:
    """Ranges of samples in their tars, for a dataset or for sources of a mixture. Thread-safe.

    Ranges are kept from one epoch to the next, in 12 bytes per sample. A copy of this object in
    another process looks the ranges up again.

    Args:
        sources: the scattered sources.
    """

    def __init__(self, sources: Sequence[ScatteredSource]) -> None:
        self._sources = sources
        self._pid = os.getpid()
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._sources,)

    def __repr__(self) -> str:
        return f"ScatteredRanges(firsts={[source.first_shard for source in self._sources]})"

    def sources_from(self, first_shard: int) -> list[ScatteredSource]:
        """Return copies of the sources for a mixture whose manifest has these shards as well.

        Args:
            first_shard: number in the mixture's manifest of the first of these shards.
        """
        return [
            ScatteredSource(first_shard + source.first_shard, copy(source.ranges))
            for source in self._sources
        ]

    def has(self, shard: int) -> bool:
        """Return True if the samples of a shard are scattered."""
        return self._source_of(shard) is not None

    def range_of(self, shard: int, number: int) -> SampleRange | None:
        """Return the range of a sample by its number in the tar; None if its shard has to be read.

        Raises ConfigError if no table has the ranges of the shard's samples, and any error of
        reading the tables.
        """
        source = self._source_of(shard)
        if source is None:
            return None
        first_shard, ranges = source
        shard_in_source = shard - first_shard
        self._forget_if_forked()
        with self._lock:
            byte_range = ranges.range_of(shard_in_source, number)
            # A single sample without a range is read with its shard. But if no sample in its row of
            # the table has a range, every sample would be read in this way, which is an error.
            if byte_range is None and not ranges.has_ranges_in_row(shard_in_source, number):
                raise _unlisted(ranges, shard_in_source)
        if byte_range is None or first_shard == 0:
            return byte_range
        return replace(byte_range, shard=shard)  # the shard's number in the manifest

    def known_range_of(self, shard: int, number: int) -> SampleRange | None:
        """Return the range of a sample if it is known without reading a table; None otherwise."""
        source = self._source_of(shard)
        if source is None:
            return None
        self._forget_if_forked()
        with self._lock:
            is_known = source.ranges.is_known(shard - source.first_shard, number)
        if not is_known:
            return None
        return self.range_of(shard, number)

    def close(self) -> None:
        """Release the tables; they are opened again when they are needed."""
        self._forget_if_forked()
        with self._lock:
            for source in self._sources:
                source.ranges.close()

    def _source_of(self, shard: int) -> ScatteredSource | None:
        """Return the source of a shard; None if the shard's samples are not scattered."""
        for source in self._sources:
            end_shard = source.first_shard + len(source.ranges.manifest)
            if source.first_shard <= shard < end_shard:
                return source
        return None

    def _forget_if_forked(self) -> None:
        """In a forked process, leave the open tables to the parent process.

        The lock is replaced, too, because a thread of the parent may have held it during the fork.
        """
        if self._pid == os.getpid():
            return
        self._lock = Lock()
        for source in self._sources:
            source.ranges.forget()
        self._pid = os.getpid()


def _unlisted(ranges: SampleRanges, shard: int) -> ConfigError:
    """Return the error for a shard whose samples have no ranges in a table."""
    url = ranges.manifest[shard].url
    if compression_of(url) is not None:
        return ConfigError(
            'shuffle="global" needs each sample\'s place in the tar, which a '
            "compressed tar does not have",
            url=url,
            remedy="decompress the shards, or use shuffle=True",
        )
    return ConfigError(
        'shuffle="global" needs each sample\'s place in the tar, which no table of '
        "samples next to the index file gives",
        url=url,
        remedy=TABLES_REMEDY,
    )
