"""Reader of single samples, which fetches only their byte ranges of the tars.

A sample's range is the part of its shard that has the sample's bytes. A plan tells the daemon which
objects a session may read, and a lease is the daemon's promise that something stays cached while it
is read. In a plan of ranges, leases are on byte ranges instead of whole shards. `ScatteredSamples`
and `ScatteredReader` read in this way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from shardcache.shared.exceptions import (
    ConfigError,
    ShardcacheError,
    ShardChangedError,
    ShardError,
)
from shardcache.shared.tarindex.spans import key_hash, samples_in
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.granted_file import open_granted, read_granted, read_span
from shardcache_client.reading.single.sample_ranges import SampleRange
from shardcache_client.reading.single.table_rows import TABLES_REMEDY
from shardcache_client.samples import slicing
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.slicing import Sample


@dataclass(slots=True, eq=False)
class RangeRequest:
    """A request for one sample.

    Attributes:
        byte_range: range of the sample.
        leases: lease on each piece of the range.
        number: number of the range in the order that the reader announces; None if it is not part
            of such an order.
    """

    byte_range: SampleRange
    leases: list[LeaseRequest]
    number: int | None = None


class _Piece(NamedTuple):
    """A piece of a sample's range.

    Attributes:
        shard: number of the shard in the manifest.
        span: start and stop of the piece in the shard.
        number: number of the range in the announced order, of its last piece: the release of this
            piece's lease says that all of the range was read. None otherwise.
    """

    shard: int
    span: tuple[int, int]
    number: int | None


def _pieces_of(byte_range: SampleRange, number: int | None) -> list[_Piece]:
    """Return the pieces of a range, given its number in the announced order, if it has one."""
    *others, last = byte_range.pieces
    pieces = [_Piece(byte_range.shard, span, None) for span in others]
    return [*pieces, _Piece(byte_range.shard, last, number)]


class RangeReader:
    """Reads samples by their ranges. All samples that were asked for are fetched at the same time.

    The lease of a sample that was taken is released soon: together with the next requests, or
    before a wait, or by `flush`. So hardly more is protected from eviction than the samples that
    are still to be taken.
    """

    def __init__(
        self,
        session: Session,
        manifest: Manifest,
        view_of: Callable[[int], View],
    ) -> None:
        """Declare a plan of ranges of a manifest's shards.

        Args:
            session: the session, which must have no leases of an earlier plan.
            manifest: the shards. A range names its shard by the number in the manifest.
            view_of: returns the form in which the samples of a shard are read, given its number.
        """
        self._session = session
        self._view_of = view_of
        # The daemon shows epochs by number; 0 stands for reading outside of an epoch.
        plan = Plan.of(manifest, 0, range(len(manifest)), wanted="ranges")
        session.declare(plan)

    def __repr__(self) -> str:
        return f"RangeReader({self._session!r})"

    def ask(
        self,
        byte_ranges: Sequence[SampleRange],
        *,
        needed: bool,
        numbers: Sequence[int] = (),
    ) -> list[RangeRequest]:
        """Request samples without waiting for them. Each request has to be taken, or dropped.

        Args:
            byte_ranges: ranges of the samples.
            needed: True if the reader waits for the first of these samples now.
            numbers: number of each range in the order that `announce` announces; empty if they are
                not part of such an order.
        """
        ordered: Sequence[int | None] = numbers or [None] * len(byte_ranges)
        pieces: list[_Piece] = []
        for byte_range, number in zip(byte_ranges, ordered, strict=True):
            pieces += _pieces_of(byte_range, number)
        leases = iter(self._request_leases(pieces, needed=needed))
        return [
            RangeRequest(byte_range, list(islice(leases, len(byte_range.pieces))), number)
            for byte_range, number in zip(byte_ranges, ordered, strict=True)
        ]

    def _request_leases(self, pieces: Sequence[_Piece], *, needed: bool) -> list[LeaseRequest]:
        """Request a lease for each piece; for `needed`, see `ask`."""
        ranges = [(piece.shard, piece.span) for piece in pieces]
        numbers = [piece.number for piece in pieces]
        return self._session.lease_ranges(ranges, needed=needed, numbers=numbers)

    def announce(self, numbered: Sequence[tuple[int, SampleRange]], *, begins: bool) -> None:
        """Announce samples that are requested later, so that the cache keeps their parts.

        Args:
            numbered: numbers, ascending, and ranges of the samples, in the order of reading.
            begins: True if they do not continue those announced before.
        """
        flat: list[int] = []
        for number, each in numbered:
            for start, stop in each.pieces:
                flat += (number, each.shard, start, stop - 1)
        self._session.plan_ranges(flat, begins=begins)

    @property
    def has_announced(self) -> bool:
        """True if the daemon knows the samples that were announced: it may be another one since."""
        return self._session.has_range_plan

    def flush(self) -> None:
        """Release the leases of all samples that were taken."""
        self._session.flush()

    def drop(self, request: RangeRequest) -> None:
        """End a request whose sample is not taken."""
        for lease in request.leases:
            self._session.release(lease)  # no-op for a lease that has ended

    def take(self, request: RangeRequest) -> Sample:
        """Wait for a sample, and return it. This ends the request, even with an error.

        Raises any error of `Session.wait`; CacheDirError if this process cannot read the cache
        folder; ShardChangedError if the shard was replaced since its table was written; ConfigError
        if the table is wrong.
        """
        byte_range = request.byte_range
        version = byte_range.version
        data: list[bytes] = []
        url = ""
        try:
            for number in range(len(request.leases)):
                piece_data, grant = self._read(request, number)
                url = grant["url"]
                if version not in (None, grant["version"]):
                    raise ShardChangedError(
                        f"the object store has version {grant['version']}, but the table of "
                        f"samples describes {version}",
                        url=url,
                        remedy=TABLES_REMEDY,
                    )
                version = grant["version"]  # that of all further pieces
                data.append(piece_data)
        except (ShardcacheError, OSError):
            self.drop(request)  # the pieces that were not read
            raise
        return _cut_sample(b"".join(data), byte_range, url, self._view_of(byte_range.shard))

    def came_from_whole_shard(self, request: RangeRequest) -> bool:
        """Return True if the shard of a sample that was taken is cached as a whole."""
        return all(lease.is_granted_whole for lease in request.leases)

    def _read(self, request: RangeRequest, number: int) -> tuple[bytes, Grant]:
        """Return the bytes of a piece of a sample's range, and the grant by which they were read.

        Args:
            request: the request.
            number: number of the piece.
        """
        piece = request.byte_range.pieces[number]

        def request_again() -> LeaseRequest:
            """Request the bytes by a new lease, for which the reader is now waiting."""
            pieces = [_pieces_of(request.byte_range, request.number)[number]]
            (request.leases[number],) = self._request_leases(pieces, needed=True)
            return request.leases[number]

        def read(grant: Grant) -> tuple[bytes, Grant]:
            """Read the bytes from the file of a grant."""
            return _read_piece(grant, piece), grant

        first_lease = request.leases[number]
        lease, (data, grant) = read_granted(self._session, first_lease, request_again, read)
        # The lease ends before the next piece is waited for: a reader may need one at a time.
        self._session.release_later(lease)
        # A needed lease takes space in addition to that for samples requested ahead. So it is
        # released immediately.
        if lease.needed:
            self._session.flush()
        return data, grant


def _read_piece(grant: Grant, piece: tuple[int, int]) -> bytes:
    """Return the bytes from the start of a piece to its stop.

    Raises CorruptShardError if the path has another file, CacheDirError if it cannot be read.
    """
    fd = open_granted(grant)
    try:
        start, stop = piece
        return read_span(fd, start, stop)
    finally:
        os.close(fd)


def _cut_sample(data: bytes, byte_range: SampleRange, url: str, view: View) -> Sample:
    """Return the sample in the bytes of a range.

    Args:
        data: the bytes of the range's pieces: whole members, each with its headers.
        byte_range: the range.
        url: url of the shard.
        view: the form in which the sample is read.

    Raises ConfigError if the bytes are not one sample, or not the sample that the table lists.
    """
    try:
        tables = samples_in(data, url)
    except ShardError as exn:
        raise _wrong_range(byte_range, url) from exn
    if len(tables) != 1:
        raise _wrong_range(byte_range, url)
    columns = slicing.choose_columns(
        slicing.undecoded_columns(tables.extensions, data),
        view.reads,
        view.prefix,
    )
    (sample,) = slicing.cut(tables, columns, url, 0, 1)  # the first and only sample
    if key_hash(sample["__key__"]) != byte_range.key_hash:
        raise _wrong_range(byte_range, url)
    return sample


def _wrong_range(byte_range: SampleRange, url: str) -> ConfigError:
    """Return the error for a range that does not hold its sample."""
    return ConfigError(
        f"the table of samples does not match this shard: bytes {byte_range.start} "
        f"to {byte_range.stop} are not the sample that it lists there",
        url=url,
        remedy=TABLES_REMEDY,
    )
