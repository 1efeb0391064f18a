"""A leased shard, read to its last sample across changes of file and daemon.

A lease is a reader's claim on a shard; the daemon grants it by naming a file, which stays cached
until the lease is released. The file of a shard that is arriving (being downloaded) can be read up
to the bytes that are there. A lease may get several grants: more of an arriving file, the whole
file, or a file of the next daemon. The readers in `reading.epochs` take these objects from a
`ShardWindow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import WeakMethod

from shardcache.shared import exceptions
from shardcache.shared.protocol import Arriving, Leased
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.reading.leased.joined_samples import JoinFacts, SampleJoin
from shardcache_client.reading.leased.shards import ArrivingShard, MappedShard, More, ShardPlace
from shardcache_client.samples.mapped_file import damage_of
from shardcache_client.samples.sample_view import WHOLE, View
from shardcache_client.samples.slicing import Sample

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

# Maximum number of files that are tried. A shard leased ahead may be evicted for a shard that is
# needed sooner, but that hardly happens again while the reader waits for it. A process that cannot
# see the cache, or finds damage, fails each time, unless the session changes to another daemon.
_MAX_TRIES = 5
_NO_FACTS = JoinFacts()


class JoinedColumn(NamedTuple):
    """The shards of one source of a join that hold further members of a shard's samples.

    Attributes:
        view: the form in which samples of these shards are read.
        shards: all shards of the source that hold partners, which are samples with the same keys.
    """

    view: View
    shards: Sequence[LeasedShard]


@dataclass(eq=False, repr=False)
class LeasedShard:
    """Reads a shard's samples, from one grant after another.

    When a file cannot be read any further, reading continues in the next grant's file with the
    sample that comes next. Every error says how many samples of the shard had already been yielded.
    This object owns the lease, and releases it in `close`.

    Attributes:
        count: number of samples according to the manifest; None if unknown.
        span: number of the first sample and number after the last sample for `samples`, which reads
            in order; an end of None means the end of the shard. A span of None is for `sample`,
            which reads single samples.
        handover: passes the samples' values to other processes without a copy; None for values that
            stay in this process.
        view: the form in which samples are read.
        columns: shards of other sources with the samples' partners, whose members the samples get.
        join_facts: facts about the join of this shard with the shards of `columns`.
        replaceable: True if another version of the shard may be read, because none of its samples
            was handed out in this epoch.
    """

    _session: Session
    _lease: LeaseRequest
    _: KW_ONLY
    count: int | None = None
    span: tuple[int, int | None] | None = None
    handover: Handover | None = None
    view: View = WHOLE
    columns: Sequence[JoinedColumn] = ()
    join_facts: JoinFacts = _NO_FACTS
    replaceable: bool = False

    def __post_init__(self) -> None:
        self._start, self._stop = self.span or (0, None)
        self._shard: MappedShard | ArrivingShard | None = None
        self._cut: Callable[[int], Sample] | None = None  # set once the whole shard is open
        self._version: str | None = None  # the version that the samples so far were read from
        # Number of samples that were yielded. Without a span, only those are counted that were read
        # while the shard was arriving.
        self._yielded = 0
        self._bad_count = 0  # number of samples of the span that could not be yielded
        self._last_key = ""
        self._is_second_try_used = False
        self._was_unpublished = False  # True once a granted file was not published yet

    def __repr__(self) -> str:
        return (
            f"LeasedShard(position={self._lease.position}, yielded={self._yielded}, "
            f"{self._shard!r})"
        )

    @property
    def _next_number(self) -> int:
        """Number of the next sample of the span."""
        return self._start + self._yielded + self._bad_count

    def open(self) -> None:
        """Wait for the shard, or its beginning, and map it.

        Raises any error of `Session.wait` and `MappedShard`; ShardChangedError if the origin has
        replaced the shard after some of its samples were yielded.
        """
        with self._counting_yielded():
            self._reopen()
        for shard in self._joined_shards():
            shard.open()

    def close(self) -> None:
        """Unmap the shard and release the lease."""
        for shard in self._joined_shards():
            shard.close()
        self._close_shard()
        self._session.release(self._lease)

    def samples(self) -> Iterator[Sample]:
        """Yield the remaining samples of the span, in file order. This object must be open.

        Raises SampleError in place of a bad sample; another call yields the samples after it. Any
        other error concerns the shard.
        """
        with self._counting_yielded():
            while True:
                try:
                    yield from self._samples_of_file()
                except exceptions.ShardcacheError as exn:
                    if not self._use_second_try(exn):
                        raise
                    self._ask_again()
                else:
                    # A whole shard has no further samples. An arriving shard may end earlier.
                    if self.is_whole or self._next_number == self._stop:
                        return
                # The rest of the samples is in another file: a new grant names it.
                self._reopen()

    def sample(self, number: int) -> Sample:
        """Return any sample by its number, as soon as it has arrived.

        This object must be open, and have no span.

        Raises SampleError for a bad sample. Any other error concerns the shard.
        """
        if self._cut is not None:
            return self._cut(number)
        with self._counting_yielded():
            while not isinstance(self._shard, MappedShard):
                assert self._shard is not None
                try:
                    # An arriving shard waits until the sample has arrived.
                    sample = next(self._shard.samples(number, number + 1), None)
                except exceptions.SampleError:
                    raise
                except exceptions.ShardcacheError as exn:
                    if not self._use_second_try(exn):
                        raise
                    self._ask_again()
                else:
                    if sample is not None:
                        self._yielded += 1
                        return sample
                    # The sample has to be read from another file, usually the whole shard's.
                self._reopen()
        self._cut = self.cutter()
        return self._cut(number)

    def cutter(self) -> Callable[[int], Sample]:
        """Return a function that returns any sample by its number.

        The function raises SampleError for a bad sample. The whole shard must be open.
        """
        if not self.columns:
            return self.whole.cutter()
        join = SampleJoin(self.whole, self._lease, self.join_facts)
        join.add_own(self.view)
        for view, shards in self.columns:
            join.add(view, [shard.whole for shard in shards])
        return join.cutter()

    @property
    def is_settled(self) -> bool:
        """True if every other process has mapped the files of all samples that were sent to it."""
        if isinstance(self._shard, MappedShard) and not self._shard.is_settled:
            return False
        return all(shard.is_settled for shard in self._joined_shards())

    @property
    def is_whole(self) -> bool:
        """True if the whole shard has arrived, and is open."""
        return isinstance(self._shard, MappedShard)

    @property
    def whole(self) -> MappedShard:
        """The whole shard; `is_whole` must be true."""
        assert isinstance(self._shard, MappedShard)
        return self._shard

    def _joined_shards(self) -> Iterator[LeasedShard]:
        """Return the shards of all columns that are joined with this shard."""
        return chain.from_iterable(column.shards for column in self.columns)

    def _reopen(self) -> None:
        """Unmap the previous grant's file, and map the file of the present grant.

        If that fails, and a second try may help, request the shard again.
        """
        self._close_shard()
        try:
            self._shard = self._wait_and_map()
        except exceptions.ShardcacheError as exn:
            if not self._use_second_try(exn):
                raise
            self._ask_again()
            self._shard = self._wait_and_map()

    def _use_second_try(self, exn: exceptions.ShardcacheError) -> bool:
        """Use the second try if it may help after an error; return False if it is not used.

        One more try is enough, as the daemon itself retries a download once. A shard whose files
        were all published when granted gets none: its download had already succeeded.

        The caller raises the error. If this method did, the error's traceback would have this
        method's frame, which refers to the error. Such a cycle would keep the whole iteration
        alive, session included, until the garbage collector runs.
        """
        if self._is_second_try_used or not self._was_unpublished:
            return False
        if isinstance(exn, exceptions.ShardChangedError | exceptions.CorruptShardError):
            # The next download may bring a sound file, but its samples may be different ones. So it
            # helps only if no sample has been yielded yet.
            may_help = self._next_number == self._start
        else:
            # A shard that merely did not arrive can be continued after the yielded samples.
            may_help = isinstance(exn, exceptions.OriginUnavailableError | exceptions.DiskError)
        if may_help:
            self._is_second_try_used = True
        return may_help

    def _samples_of_file(self) -> Iterator[Sample]:
        """Yield the samples of the present file from the next sample on."""
        assert self._shard is not None
        try:
            if self.columns:
                samples = self._joined_samples()
            else:
                samples = self._shard.samples(self._next_number, self._stop)
            for sample in samples:
                self._yielded += 1
                self._last_key = sample["__key__"]
                yield sample
        except exceptions.SampleError:
            self._bad_count += 1
            raise

    def _joined_samples(self) -> Iterator[Sample]:
        """Return the joined samples from the next sample on, up to the end of the span."""
        if self._cut is None:
            self._cut = self.cutter()
        numbers = range(len(self.whole))[self._next_number : self._stop]
        return map(self._cut, numbers)

    def _wait_and_map(self) -> MappedShard | ArrivingShard:
        """Wait for the grant, and map its file; ask for another grant while that may help."""
        tries_left = _MAX_TRIES
        was_checked = False
        while True:
            grant = self._wait_for_grant()
            self._start_over_if_replaced(grant)
            try:
                return self._map(grant)
            except (
                exceptions.CacheDirError,
                exceptions.CorruptShardError,
                exceptions.TokensError,
            ) as exn:
                tries_left -= 1
                # If the daemon has checked the file and it still has no tokens, then the object in
                # the store has none either: another grant would not help.
                is_final = was_checked and isinstance(exn, exceptions.TokensError)
                if is_final or not tries_left:
                    raise
                damage = damage_of(exn)
            if _is_unpublished(grant):
                # By now the file has been published, or its download was given up. The answer to a
                # request for more bytes than the shard has comes once the daemon knows which.
                self._session.more(self._lease, beyond=grant["size_bytes"])
            else:
                self._ask_again(damage)
                was_checked = bool(damage)  # the daemon checks a shard that is reported damaged

    def _wait_for_grant(self) -> Grant:
        """Wait for the grant. If only a later version exists by now, wait for its grant instead.

        Raises OutdatedError if a later version will not do: other samples of this version were
        handed out, or the lease is on the latest version already.
        """
        try:
            return self._session.wait(self._lease)
        except exceptions.OutdatedError:
            if not self.replaceable or self._yielded or self._lease.latest:
                raise
        # The whole shard is requested, so that its number of samples is compared with the manifest
        # before the first sample is yielded.
        position = self._lease.position
        self._lease = self._session.lease(position, partial=False, unpublished=True, latest=True)
        return self._session.wait(self._lease)

    def _ask_again(self, damage: str = "") -> None:
        """Release the lease, and request the same shard again.

        Args:
            damage: what was found wrong with the file; empty if the file is not damaged.
        """
        self._session.release(self._lease, unreadable=True, damage=damage)
        previous = self._lease
        self._lease = self._session.lease(
            previous.position,
            partial=previous.partial,
            unpublished=True,
            latest=previous.latest,
        )

    def _map(self, grant: Grant) -> MappedShard | ArrivingShard:
        """Map the file of a grant, which holds the whole shard or is still arriving."""
        if _is_unpublished(grant):
            self._was_unpublished = True
        if grant["type"] == "arriving":
            last = None if self.count is None else self.count - 1
            arriving = cast(Arriving, grant)
            return ArrivingShard(arriving, self._weak_more(), last, self.view)
        return self._map_whole(cast(Leased, grant))

    def _map_whole(self, leased: Leased) -> MappedShard:
        """Map a whole shard. Raises CountMismatchError if it has too many samples, or too few."""
        if self.view.blocks is None:
            # The manifest counts samples, as the grant does, so no file has to be mapped for this.
            self._check_count(leased["samples"], "samples", leased["url"])
        place = ShardPlace(Path(leased["path"]), Path(leased["index_path"]), leased.get("inode"))
        shard = MappedShard(
            place,
            leased["url"],
            in_order=self.span is not None,
            handover=self.handover,
            view=self.view,
        )
        try:
            # For a view of token blocks, the manifest counts blocks, and only the mapped shard
            # knows their number. For other views this repeats the check above.
            self._check_count(len(shard), "blocks of tokens", leased["url"])
        except exceptions.CountMismatchError:
            shard.close()
            raise
        return shard

    def _check_count(self, count: int, unit: str, url: str) -> None:
        """Raise CountMismatchError unless the shard has as many samples as the manifest says.

        Args:
            unit: noun for what is counted, for the message.
        """
        if self.count in (None, count):
            return
        if self._lease.latest:
            raise exceptions.CountMismatchError(
                "the shard was replaced in the object store since it was listed, and "
                f"holds {count} {unit} instead of {self.count}",
                url=url,
                remedy="restart the job, which lists the shards again",
            )
        raise exceptions.CountMismatchError(
            f"the shard holds {count} {unit}, but the dataset's list says {self.count}",
            url=url,
        )

    def _weak_more(self) -> More:
        """Return a function that does the same as `_more`, without a reference to this object.

        This object refers to the arriving shard, which refers to that function. A cycle would keep
        the session of a reader that is gone alive until the garbage collector runs.
        """
        weak_method = WeakMethod(self._more)

        def wait_for_more(beyond: int) -> Arriving | None:
            more = weak_method()
            assert more is not None  # the function is called only while this object reads
            return more(beyond)

        return wait_for_more

    def _more(self, beyond: int) -> Arriving | None:
        """Wait until more than `beyond` bytes have arrived; see `More`."""
        grant = self._session.more(self._lease, beyond)
        # None: the connection broke. Another type: the whole shard has its own file now.
        if grant is None or grant["type"] != "arriving":
            return None
        return cast(Arriving, grant)

    def _start_over_if_replaced(self, grant: Grant) -> None:
        """Begin again at the first sample if the grant is for another version of the shard.

        Raises ShardChangedError if samples of the earlier version were yielded.
        """
        if self._version not in (None, grant["version"]):
            if self._yielded:
                raise exceptions.ShardChangedError(
                    "the shard was replaced in the object store while being read",
                    url=grant["url"],
                )
            self._bad_count = 0
        self._version = grant["version"]

    @contextmanager
    def _counting_yielded(self) -> Iterator[None]:
        """Add to errors of the shard how many of its samples had been yielded."""
        try:
            yield
        except exceptions.SampleError:
            raise
        except exceptions.ShardcacheError as exn:
            if self._yielded:
                exn.yielded = self._yielded
                yielded = f"{self._yielded} samples"
                if self.span:
                    yielded = f"its first {yielded}, up to key {self._last_key!r},"
                exn.message += f"; {yielded} had already been yielded"
            raise

    def _close_shard(self) -> None:
        """Unmap the shard's present file, and keep the lease."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None
            self._cut = None


def _is_unpublished(grant: Grant) -> bool:
    """Return True if a granted file may still be renamed: only then the grant has its inode."""
    return "inode" in grant
