"""Leased shards, read to their last sample across changes of file and daemon; the window of those a reader holds."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakMethod

from shardcache import errors
from shardcache.protocol import Arriving, Leased
from shardcache.tarindex.tables import keys_of
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session
from shardcache_client.files import WHOLE, Adder, Run, Sample, View, damage_of, joined
from shardcache_client.order.manifest import Plan
from shardcache_client.reading.shards import ArrivingShard, MappedShard

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

Beside: TypeAlias = "tuple[View, Sequence[LeasedShard]]"
"""Shards with members of samples that are in another shard, too, and the form in which these are read."""

# A shard leased ahead may be evicted for one that is needed sooner, but hardly again while the reader waits for it. A
# process that cannot see the cache, or finds damage, will fail each time, unless there is another way to the shard.
_TRIES = 5


_NO_PARTNER = (
    "rewrite the shards so that each sample has one partner, or give Joined missing='skip', "
    "or default values of the members"
)


class LeftOutError(errors.UnmatchedKeyError):
    """A sample without a partner, to be left out."""


def find_partners(keys: Sequence[bytes], others: Sequence[bytes]) -> list[int | None]:
    """Return the place of each key among others; None if it does not come there, or repeatedly, there or here."""
    found = dict(zip(others, count(), strict=False))
    for some, distinct in ((others, len(found)), (keys, len(set(keys)))):
        if distinct < len(some):
            for key in [key for key, times in Counter(some).items() if times > 1]:
                found.pop(key, None)
    return list(map(found.get, keys))


@dataclass(eq=False, repr=False)
class LeasedShard:
    """Reads a shard from the sample it has reached, each time from the current grant: of an arriving file, of the whole
    one, or of either from the next daemon.

    With others `beside` it, its samples have the members of theirs that have the same keys.

    Every error names the samples of the shard that had already been yielded. The lease is owned by this object.
    """

    _session: Session
    _lease: LeaseRequest
    _: KW_ONLY
    count: int | None = None  # number of samples according to the manifest; None if unknown
    span: tuple[int, int | None] | None = None  # to read in order, with None as the end for all; None to read by number
    handover: Handover | None = None
    view: View = WHOLE
    beside: Sequence[Beside] = ()
    repeated: frozenset[bytes] = frozenset()  # keys that come again in another shard: these have no partner
    tabled: frozenset[str] = frozenset()  # prefixes of those beside it that tables have found
    replaceable: bool = False  # True if another version may be read: none of the shard was handed out in this epoch

    def __post_init__(self) -> None:
        self._start, self._stop = self.span or (0, None)
        self._shard: MappedShard | ArrivingShard | None = None
        self._cut: Callable[[int], Sample] | None = None
        self._version: str | None = None
        self.number = self._start  # of the next sample; without a span, of those read before all had arrived
        self._bad = 0  # number of samples that could not be yielded
        self._last_key = ""
        self._tried_again = self._was_arriving = False

    def __repr__(self) -> str:
        return f"LeasedShard(position={self._lease.position}, yielded={self._yielded}, {self._shard!r})"

    @property
    def _yielded(self) -> int:
        return self.number - self._start - self._bad

    def open(self) -> None:
        """Wait for the shard, or its beginning, and map it. Raises what `Session.wait` and `MappedShard` raise.

        Also raises ShardChangedError if the origin has replaced the shard after some of its samples were yielded.
        """
        with self._naming_what_was_given():
            self._open()
        for each in self._joined():
            each.open()

    def close(self) -> None:
        """Unmap the shard and release the lease."""
        for each in self._joined():
            each.close()
        self._close_shard()
        self._session.release(self._lease)

    def samples(self) -> Iterator[Sample]:
        """Yield the remaining samples of the span, in file order. This object must be open.

        Raises SampleError in place of a bad sample; call again for those after it. Any other error concerns the shard.
        """
        with self._naming_what_was_given():
            while True:
                try:
                    yield from self._samples_here()
                except errors.ShardcacheError as exn:
                    if not self._may_try_again(exn):
                        raise
                    self._ask_again()
                else:
                    if isinstance(self._shard, MappedShard) or self.number == self._stop:
                        return
                self._open()

    def sample(self, number: int) -> Sample:
        """Return any sample by its number, as soon as it has arrived. This object must be open, and have no span.

        Raises SampleError for a bad sample. Any other error concerns the shard.
        """
        if self._cut is not None:
            return self._cut(number)
        with self._naming_what_was_given():
            while not isinstance(self._shard, MappedShard):
                assert self._shard is not None
                try:  # once it has arrived; None if it must be read another way
                    found = next(self._shard.samples(number, number + 1), None)
                    self.number += found is not None
                except errors.SampleError:
                    raise
                except errors.ShardcacheError as exn:
                    if not self._may_try_again(exn):
                        raise
                    self._ask_again()
                else:
                    if found is not None:
                        return found
                self._open()
        self._cut = self.cutter()
        return self._cut(number)

    def _joined(self) -> Iterator[LeasedShard]:
        return chain.from_iterable(shards for _, shards in self.beside)

    def cutter(self) -> Callable[[int], Sample]:
        """Return a function that returns any sample by its number, and raises SampleError for a bad one."""
        if not self.beside:
            return self.whole.cutter()
        keys, runs, adders, names = keys_of(self.whole.index), list[Run](), list[Adder](), set[str]()
        for view, shards in ((self.view, [self]), *self.beside):
            some = [each.whole for each in shards]
            places = range(len(keys)) if some == [self.whole] else self._places(keys, some)
            new = {view.prefix + name for each in some for name in each.index.extensions}
            alone = len(some) == 1 and names.isdisjoint(new)
            if (found := some[0].runs(places) if alone else None) is not None:
                runs += found
            else:
                adders.append(self._adder(keys, places, view, some))
            names |= new
        return joined(keys, self.whole.url, runs, adders)

    def _places(self, keys: Sequence[bytes], shards: Sequence[MappedShard]) -> Sequence[int | None]:
        own, *others = [(each.index.keys.tobytes(), each.index.key_ends.tobytes()) for each in (self.whole, *shards)]
        if others == [own] and len(set(keys)) == len(keys) and not self.repeated:
            return range(len(keys))
        found = find_partners(keys, [*chain.from_iterable(keys_of(each.index) for each in shards)])
        return [None if key in self.repeated else place for key, place in zip(keys, found, strict=True)]

    def _adder(
        self, keys: Sequence[bytes], places: Sequence[int | None], view: View, shards: Sequence[MappedShard]
    ) -> Adder:
        lease, url = self._lease, self.whole.url  # a cycle would keep the session of a reader that is gone
        cuts = [pair for each in shards for pair in zip(repeat(each.cutter()), range(len(each)))]
        lost = [key.decode(errors="replace") for key, place in zip(keys, places, strict=True) if place is None]
        where = ", ".join(each.url for each in shards) or f"any shard of {view.prefix!r}"
        fault = f"{len(lost)} of {len(keys)} keys have no partner in {where}, or several: {str(lost[:3])[1:-1]}"
        if self.repeated:
            example = min(self.repeated).decode(errors="replace")
            fault += f"; {example!r} comes again in another shard of the first source"

        # With tables, a partner would have been found in any shard.
        remedy = _NO_PARTNER if view.prefix in self.tabled else None

        def add(number: int, sample: Sample) -> None:
            if (place := places[number]) is not None:
                cut, other = cuts[place]
                added = cut(other, {})
                if twice := added.keys() & sample:
                    reason = f"the sample {sample['__key__']!r} has two members {min(twice)!r}"
                    raise errors.SampleError(
                        f"{reason}, of shards that are joined",
                        url=url,
                        remedy="give the source of one of them another prefix, or leave one out by members=",
                    )
                sample |= added
                return
            lease.unmatched += 1
            if view.unmatched != "fill":
                kind = LeftOutError if view.unmatched == "skip" else errors.UnmatchedKeyError
                reason = f"the sample {sample['__key__']!r} cannot be joined: {fault}"
                raise kind(reason, url=url, remedy=remedy)

        return add

    @property
    def settled(self) -> bool:
        """True if every other process has mapped the files of the samples sent to it."""
        own = not isinstance(self._shard, MappedShard) or self._shard.settled
        return own and all(each.settled for each in self._joined())

    @property
    def is_whole(self) -> bool:
        """True if the whole shard has arrived, and is open."""
        return isinstance(self._shard, MappedShard)

    @property
    def whole(self) -> MappedShard:
        """The whole shard. This object must be open, and its lease not partial."""
        assert isinstance(self._shard, MappedShard)
        return self._shard

    def _open(self) -> None:
        self._close_shard()
        try:
            self._shard = self._opened()
        except errors.ShardcacheError as exn:
            if not self._may_try_again(exn):
                raise
            self._ask_again()
            self._shard = self._opened()

    def _may_try_again(self, exn: errors.ShardcacheError) -> bool:
        """Return True if the shard should be requested again after an error; only once, as the daemon retries once."""
        # The next version, or the next try, may be whole, which helps as long as no sample of this one was yielded; a
        # shard that merely did not arrive can be read on. The caller raises: an exception referenced from a frame of
        # its own traceback would keep the whole iteration alive, session included, until the garbage collector runs.
        anew = isinstance(exn, errors.ShardChangedError | errors.CorruptShardError) and self.number == self._start
        late = isinstance(exn, errors.OriginUnavailableError | errors.DiskError)
        if self._tried_again or not self._was_arriving or not (anew or late):
            return False
        self._tried_again = True
        return True

    def _samples_here(self) -> Iterator[Sample]:
        assert self._shard is not None
        try:
            for sample in self._joined_samples() if self.beside else self._shard.samples(self.number, self._stop):
                self.number += 1
                self._last_key = sample["__key__"]
                yield sample
        except errors.SampleError:
            self.number += 1
            self._bad += 1
            raise

    def _joined_samples(self) -> Iterator[Sample]:
        self._cut = self._cut or self.cutter()
        return map(self._cut, range(len(self.whole))[self.number : self._stop])

    def _opened(self) -> MappedShard | ArrivingShard:
        tries_left, was_checked = _TRIES, False
        while True:
            grant = self._granted()
            self._check_version(grant)
            try:
                return self._map(grant)
            except (errors.CacheDirError, errors.CorruptShardError, errors.TokensError) as exn:
                # Tokens that are missing from a file that the daemon has checked are missing in the object store.
                tries_left = 0 if was_checked and isinstance(exn, errors.TokensError) else tries_left - 1
                if not tries_left:
                    raise
                damage = damage_of(exn)
            if "inode" in grant:  # published or given up since: the daemon knows which
                self._session.more(self._lease, grant["size_bytes"])
            else:
                self._ask_again(damage)
                was_checked = bool(damage)

    def _granted(self) -> Grant:
        try:
            return self._session.wait(self._lease)
        except errors.OutdatedError:
            if not self.replaceable or self._yielded or self._lease.latest:
                raise
        # Not partial: the numbers of samples are compared before the first is yielded.
        position = self._lease.position
        self._lease = self._session.lease(position, partial=False, unpublished=True, latest=True)
        return self._session.wait(self._lease)

    def _ask_again(self, damage: str = "") -> None:
        self._session.release(self._lease, read=False, damage=damage)
        previous = self._lease
        self._lease = self._session.lease(
            previous.position, partial=previous.partial, unpublished=True, latest=previous.latest
        )

    def _map(self, grant: Grant) -> MappedShard | ArrivingShard:
        if "inode" in grant:
            self._was_arriving = True
        if grant["type"] == "arriving":
            last = None if self.count is None else self.count - 1
            more = WeakMethod(self._more)  # a cycle would keep the session of a reader that is gone
            return ArrivingShard(cast(Arriving, grant), lambda beyond: more()(beyond), last, self.view)  # type: ignore[misc]
        leased = cast(Leased, grant)
        if self.view.blocks is None:
            self._check_count(leased["samples"], "samples", leased["url"])
        shard = MappedShard(
            Path(leased["path"]),
            Path(leased["index_path"]),
            leased["url"],
            inode=leased.get("inode"),
            in_order=self.span is not None,
            handover=self.handover,
            view=self.view,
        )
        try:
            self._check_count(len(shard), "blocks of tokens", leased["url"])
        except errors.CountMismatchError:
            shard.close()
            raise
        return shard

    def _check_count(self, count: int, unit: str, url: str) -> None:
        if self.count in (None, count):
            return
        if self._lease.latest:
            raise errors.CountMismatchError(
                f"it was replaced in the object store since it was listed, and holds {count} {unit} instead of "
                f"{self.count}",
                url=url,
                remedy="start the job again, which lists the shards anew",
            )
        raise errors.CountMismatchError(f"it holds {count} {unit}, but the manifest says {self.count}", url=url)

    def _more(self, beyond: int) -> Arriving | None:
        grant = self._session.more(self._lease, beyond)
        return cast(Arriving, grant) if grant is not None and grant["type"] == "arriving" else None

    def _check_version(self, grant: Grant) -> None:
        """Start over with another version, unless samples of this one were yielded."""
        if self._version not in (None, grant["version"]):
            if self._yielded:
                raise errors.ShardChangedError(
                    "the shard was replaced in the object store while being read", url=grant["url"]
                )
            self.number, self._bad = self._start, 0
        self._version = grant["version"]

    @contextmanager
    def _naming_what_was_given(self) -> Iterator[None]:
        try:
            yield
        except errors.SampleError:
            raise
        except errors.ShardcacheError as exn:
            if self._yielded:
                exn.yielded = self._yielded
                first = f"its first {self._yielded} samples, up to key {self._last_key!r},"
                exn.message += f"; {first if self.span else f'{self._yielded} samples'} had already been yielded"
            raise

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard, self._cut = None, None


@dataclass(slots=True, eq=False, repr=False)
class ShardWindow:
    """Takes the shards of a declared plan one after another and releases them in any order."""

    _session: Session
    _plan: Plan
    _: KW_ONLY
    partial: bool | None  # True if a shard's beginning will do; None: the session's default
    handover: Handover | None = None
    view_of: Callable[[int, str | None], View] = lambda number, column: WHOLE  # of a shard, or those beside it
    _ahead: deque[list[LeaseRequest]] = field(default_factory=deque, init=False)
    _asked: int = field(default=0, init=False)
    _taken: list[LeasedShard] = field(default_factory=list, init=False)
    _leaving: list[LeasedShard] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._session.on_wait = self.let_go  # while we wait, others may be waiting for space that this frees

    def __repr__(self) -> str:
        asked = f"{self._asked}/{self._plan.reads}"
        return f"ShardWindow(taken={len(self._taken)}, leaving={len(self._leaving)}, asked={asked})"

    def ask(self, ahead: int) -> None:
        """Request shards ahead until there are `ahead` of them, earlier requests included."""
        manifest = self._plan.manifest
        partial = False if manifest.columns else self.partial
        while len(self._ahead) < ahead and self._asked < self._plan.reads:
            first, shards = self._asked, manifest.together(self._plan.order[self._asked])
            self._asked += len(shards)
            lease = functools.partial(self._session.lease, partial=partial, unpublished=True)
            self._ahead.append([lease(position) for position in range(first, self._asked)])

    def take(
        self, number: int, count: int | None, span: tuple[int, int | None] | None = None, *, is_fresh: bool = False
    ) -> LeasedShard:
        """Return the next shard, whose number in the manifest is given, to be opened.

        With `is_fresh`, nobody has been given samples of it in this epoch.
        """
        self.ask(1)
        self.let_go()
        lease, *others = self._ahead.popleft()
        beside = self._beside(number, iter(others))
        options: dict[str, Any] = {"handover": self.handover, "view": self.view_of(number, None), "beside": beside}
        options["repeated"] = self._plan.manifest.repeated_in(number)
        options["tabled"] = self._plan.manifest.tabled(number)
        options["replaceable"] = is_fresh and self._plan.manifest.is_replaceable
        leased_shard = LeasedShard(self._session, lease, count=count, span=span, **options)
        if lease.position:  # after the request for the shard, and not for the first: neither is delayed
            self._session.extend()
        self._taken.append(leased_shard)
        return leased_shard

    def _beside(self, number: int, leases: Iterator[LeaseRequest]) -> list[Beside]:
        found: list[Beside] = []
        for prefix, shards in self._plan.manifest.beside(number).items():
            options: dict[str, Any] = {"handover": self.handover, "view": self.view_of(number, prefix)}
            counts = [self._plan.manifest.planned[each].samples for each in shards]
            leased = [LeasedShard(self._session, next(leases), count=each, **options) for each in counts]
            found.append((options["view"], leased))
        return found

    def give_back(self, leased_shard: LeasedShard) -> None:
        """Release a shard, now or as soon as every process has received the samples sent to it."""
        self._taken.remove(leased_shard)
        self._leaving.append(leased_shard)
        self.let_go()

    def empty(self) -> None:
        """Release everything, at the end of the epoch or when the rest is no longer wanted.

        Files that other processes have yet to map stay mapped by their samples, and so stay cached; see `handover`.
        """
        for leased_shard in (*self._taken, *self._leaving):
            leased_shard.close()
        self._taken, self._leaving = [], []
        self._session.on_wait = None
        while self._ahead:
            for lease in self._ahead.popleft():
                self._session.release(lease)

    def let_go(self) -> None:
        """Release the shards given back whose samples have been received by every process they were sent to."""
        if self.handover is not None:
            self.handover.settle()  # including those of earlier epochs
        for leased_shard in [each for each in self._leaving if each.settled]:
            self._leaving.remove(leased_shard)
            leased_shard.close()
