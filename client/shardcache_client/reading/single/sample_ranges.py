"""Reader of samples by their ranges of tars; nothing else of the tars is fetched.

A place names a sample's range: its shard, and the start and end of its bytes. The daemon is asked
by a plan of ranges, a plan whose leases are on byte ranges of objects instead of whole shards.
`ScatteredSamples` and `ScatteredReader` read in this way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardcache.errors import ConfigError, ShardChangedError, ShardError
from shardcache.tarindex.spans import check_of, samples_in
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.granted_file import open_granted, read_granted, read_span
from shardcache_client.reading.single.sample_places import SamplePlace
from shardcache_client.reading.single.table_rows import TABLES_REMEDY
from shardcache_client.samples import slicing
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.slicing import Sample


@dataclass(slots=True, eq=False)
class RangeRequest:
    """A request for one sample.

    Attributes:
        place: place of the sample.
        lease: lease on the sample's bytes.
    """

    place: SamplePlace
    lease: LeaseRequest


class SampleRanges:
    """Reads samples by their places. All samples that were asked for are fetched at the same time.

    The lease of a sample that was taken is released together with the next requests, or before a
    wait, or by `flush`. So a reader of ranges protects hardly more from eviction than the samples
    that it has yet to take.
    """

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        view_of: Callable[[int], View],
    ) -> None:
        """Declare a plan of ranges of a manifest's shards.

        Args:
            session: declares the plan; it must have no leases of an earlier plan.
            manifest: the shards, by whose numbers places name them.
            view_of: returns the form in which samples of a shard are read.
        """
        self._session = session
        self._view_of = view_of
        # The daemon shows epochs by number; 0 stands for reading outside of an epoch.
        plan = Plan.of(manifest, 0, range(len(manifest)), wanted="ranges")
        session.declare(plan)

    def __repr__(self) -> str:
        return f"SampleRanges({self._session!r})"

    def ask(self, places: Sequence[SamplePlace], *, needed: bool) -> list[RangeRequest]:
        """Request samples without waiting for them. Each request has to be taken, or dropped.

        Args:
            needed: True if the reader can do nothing but wait for the first of these samples now.
        """
        leases = self._leases(places, needed=needed)
        return [RangeRequest(place, lease) for place, lease in zip(places, leases, strict=True)]

    def _leases(self, places: Sequence[SamplePlace], *, needed: bool) -> list[LeaseRequest]:
        """Request a lease for each place; `needed` as in `ask`."""
        ranges = [(place.shard, (place.start, place.stop)) for place in places]
        return self._session.lease_ranges(ranges, needed=needed)

    def flush(self) -> None:
        """Release all samples that were taken."""
        self._session.flush()

    def drop(self, request: RangeRequest) -> None:
        """End a request whose sample is not taken."""
        self._session.release(request.lease)

    def take(self, request: RangeRequest) -> Sample:
        """Wait for a sample, and return it.

        Raises any error of `Session.wait`; CacheDirError if this process cannot read the cache
        folder; ShardChangedError if the shard was replaced since its table was written; ConfigError
        if the table is wrong. The request has then ended.
        """
        place = request.place
        data, grant = self._read(request)
        if place.version not in (None, grant["version"]):
            raise ShardChangedError(
                f"the object store has version {grant['version']}, but the table of "
                f"samples describes {place.version}",
                url=grant["url"],
                remedy=TABLES_REMEDY,
            )
        return _cut_sample(data, place, grant["url"], self._view_of(place.shard))

    def is_whole(self, request: RangeRequest) -> bool:
        """Return whether a sample that was taken came from a shard that is cached as a whole."""
        return request.lease.is_granted_whole

    def _read(self, request: RangeRequest) -> tuple[bytes, Grant]:
        """Return the bytes of a sample, and the grant by which they were read."""
        place = request.place

        def request_again() -> LeaseRequest:
            """Request the bytes by a new lease, for which the reader is now waiting."""
            (request.lease,) = self._leases([place], needed=True)
            return request.lease

        def read(grant: Grant) -> tuple[bytes, Grant]:
            return _read_place(grant, place), grant

        lease, (data, grant) = read_granted(self._session, request.lease, request_again, read)
        self._session.release_later(lease)
        # The daemon gives a needed lease space in addition to the space for samples requested
        # ahead. So this space is released immediately.
        if lease.needed:
            self._session.flush()
        return data, grant


def _read_place(grant: Grant, place: SamplePlace) -> bytes:
    """Return the bytes of a place. Raises CorruptShardError, CacheDirError."""
    fd = open_granted(grant)
    try:
        data = read_span(fd, place.start, place.stop)
    finally:
        os.close(fd)
    return data


def _cut_sample(data: bytes, place: SamplePlace, url: str, view: View) -> Sample:
    """Return the sample in the bytes of a place.

    Raises ConfigError if the bytes are not one sample, or not the sample that the table lists.
    """
    try:
        tables = samples_in(data, url)
    except ShardError as exn:
        raise _misplaced(place, url) from exn
    if len(tables) != 1:
        raise _misplaced(place, url)
    columns = slicing.chosen(
        slicing.as_bytes(tables.extensions, data),
        view.reads,
        view.prefix,
    )
    (sample,) = slicing.cut(tables, columns, url, 0, 1)  # from sample 0 up to sample 1
    if check_of(sample["__key__"]) != place.check:
        raise _misplaced(place, url)
    return sample


def _misplaced(place: SamplePlace, url: str) -> ConfigError:
    """Return the error for a place that does not hold its sample."""
    return ConfigError(
        f"the table of samples does not match this shard: bytes {place.start} to "
        f"{place.stop} are not the sample that it lists there",
        url=url,
        remedy=TABLES_REMEDY,
    )
