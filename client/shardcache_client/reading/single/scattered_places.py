"""Places of the samples that are read one by one, as `shuffle="global"` has them come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Any

from shardcache.errors import ConfigError
from shardcache.shared.urls.url_names import compression_of
from shardcache_client.reading.single.sample_places import SamplePlace, SamplePlaces
from shardcache_client.reading.single.table_rows import TABLES_REMEDY


class ScatteredPlaces:
    """Places in their tars of the samples of a dataset, or of sources of a mixture. Any thread.

    They are kept from one epoch to the next, 12 bytes a sample; a copy for another process finds
    them again.

    Args:
        sources: the places of each, with the number in the manifest of its first shard.
    """

    def __init__(self, sources: Sequence[tuple[int, SamplePlaces]]) -> None:
        self._sources = sources
        self._pid = os.getpid()
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._sources,)

    def __repr__(self) -> str:
        return f"ScatteredPlaces(firsts={[first for first, _ in self._sources]})"

    def moved(self, first: int) -> list[tuple[int, SamplePlaces]]:
        """Return a copy for a mixture, in which the first shard has another number."""
        return [(first + own, copy(places)) for own, places in self._sources]

    def has(self, shard: int) -> bool:
        """Return whether the samples of a shard are read one by one."""
        return self._source_of(shard) is not None

    def place(self, shard: int, number: int) -> SamplePlace | None:
        """Return where a sample is, by its number in the tar; None if its shard has to be read.

        Raises ConfigError if no table says where the samples of its shard are, and what reading the
        tables raises.
        """
        source = self._source_of(shard)
        if source is None:
            return None
        first, places = source
        self._leave_parent()
        with self._lock:
            found = places.place(shard - first, number)
            if found is None and not places.are_listed(shard - first, number):
                raise _unlisted(places, shard - first)
        if found is None or not first:
            return found
        return replace(found, shard=shard)

    def close(self) -> None:
        """Release the tables; they are opened again when they are needed."""
        self._leave_parent()
        with self._lock:
            for _, places in self._sources:
                places.close()

    def _source_of(self, shard: int) -> tuple[int, SamplePlaces] | None:
        for first, places in self._sources:
            if first <= shard < first + len(places.manifest):
                return first, places
        return None

    def _leave_parent(self) -> None:
        """Leave to the parent of a forked process what it has open, and what its threads hold."""
        if self._pid == os.getpid():
            return
        self._lock = Lock()
        for _, places in self._sources:
            places.forget()
        self._pid = os.getpid()


def _unlisted(places: SamplePlaces, shard: int) -> ConfigError:
    url = places.manifest[shard].url
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
