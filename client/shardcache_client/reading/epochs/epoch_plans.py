"""The plans of one epoch: declared one after another, each read through a window.

A plan tells the daemon which shards this reader needs, in the order of need, so that the daemon
prefetches them. A window requests the plan's shards ahead and releases them. The readers of this
package share the definitions here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shardcache.shared.exceptions import (
    CapacityError,
    DiskFullError,
    OriginError,
    ShardError,
    ShardTimeoutError,
)
from shardcache_client.daemon.session import Session
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.shard_window import ShardWindow
from shardcache_client.reading.single.scattered_ranges import ScatteredRanges
from shardcache_client.samples.sample_view import WHOLE, View
from shardcache_client.samples.slicing import Sample

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

# Errors of a single shard. Any other error would affect the next shard as well.
SHARD_ERRORS = (OriginError, ShardError, CapacityError, DiskFullError, ShardTimeoutError)

# Maximum number of visits (uses of a shard) in a plan. It is limited because the daemon keeps the
# plan in memory. The plan names the shards of the next plan as well, so prefetching does not pause.
MAX_VISITS = 4_000

# Maximum number of open requests for shards that are needed at the same place. It is limited
# because a large `shuffle_window` needs many shards there, and the daemon stops reading from a
# session that has too many open requests.
MAX_AT_ONCE = 8

ReadResult: TypeAlias = "Sample | Exception"
"""A sample, or the error of reading the sample or its shard.

Errors are stripped of their traceback by `with_traceback(None)`: its frames would keep the session
alive after its reader is gone.
"""


class PlacesReader(Protocol):
    """Reads the samples at the places of an epoch, in ascending order."""

    def reads(self, start: int, stop: int) -> Iterator[ReadResult]:
        """Yield the results of reading the places from `start` to `stop`.

        The caller may leave out places, but may not return to earlier places.
        """

    def close(self) -> None:
        """Release all shards and samples that are held."""


@dataclass(frozen=True, slots=True)
class SampleForm:
    """The form in which a dataset's samples are read.

    Attributes:
        manifest: the dataset's shards.
        view_of: returns the form of a shard's samples. Its arguments are the shard's number and
            None; for the form of their partners in a joined source, the number and that source's
            prefix.
        handover: passes the samples' values to other processes without a copy; None for values that
            stay in this process.
        sources: names of a mixture's sources, which its samples get as "__source__"; empty if the
            dataset is not a mixture.
        first_shards: for each source, the number in the manifest of its first shard.
        scattered: ranges of the samples that are read one by one; None if all samples are read with
            their shards.
    """

    manifest: Manifest
    view_of: Callable[[int, str | None], View] = lambda shard, column: WHOLE
    handover: Handover | None = None
    sources: Sequence[str] = ()
    first_shards: Sequence[int] = ()
    scattered: ScatteredRanges | None = None

    def name_source(self, sample: Sample, shard: int) -> None:
        """Add the name of its source to a sample of a mixture; leave other samples as they are."""
        if self.sources:
            source = bisect_right(self.first_shards, shard) - 1
            sample["__source__"] = self.sources[source]

    def declare(self, session: Session, plan: Plan, *, partial: bool | None) -> ShardWindow:
        """Declare a plan by a session, and return the window through which its shards are read.

        Args:
            partial: True if a shard may be granted before all of it has arrived; None for the
                session's default.

        Raises NoDaemonError if the daemon stays away for longer than the session's patience.
        """
        session.declare(plan)
        return ShardWindow(
            session,
            plan,
            partial=partial,
            handover=self.handover,
            view_of=self.view_of,
        )


class EpochPlans:
    """Declares parts of an epoch to the daemon, each as a plan whose shards are read next.

    Args:
        session: declares the plans; only one thread may use it at a time.
        form: the form in which samples are read.
        number: the epoch's number, which the daemon shows.
        following: returns the shards of the next epoch. The session keeps this function, so the
            function must not refer to the session: that would be a cycle.
        check: called about once a second in a wait; it may raise to end the wait.
        is_shared: True if other processes read other places of this epoch, each by its own session.
    """

    def __init__(
        self,
        session: Session,
        form: SampleForm,
        number: int,
        following: Callable[[], Iterator[int]],
        check: Callable[[], None] = lambda: None,
        *,
        is_shared: bool = False,
    ) -> None:
        self.form = form
        self.is_shared = is_shared
        self._session = session
        self._number = number
        self._following = following
        self._check = check
        self._window: ShardWindow | None = None

    def __repr__(self) -> str:
        return f"EpochPlans(epoch={self._number}, window={self._window!r})"

    def declare(
        self,
        shards: Iterable[int],
        later: Callable[[], Iterator[int]] | None,
        *,
        in_file_order: bool,
    ) -> ShardWindow:
        """Release the shards of the last plan, declare another one, and return its window.

        Args:
            shards: numbers of the plan's shards, in the order of need.
            later: returns the shards of the epoch after these; None if the plan is the epoch's last
                one. The function must not refer to the session, either.
            in_file_order: True if each shard is read from its beginning to its end.

        Raises NoDaemonError if the daemon stays away for longer than the session's patience.
        """
        self.close()
        plan = Plan.of(self.form.manifest, self._number, shards, later or self._following)
        # The samples of an arriving shard come in file order. Any other order needs the whole
        # shard, so nothing less may be granted; None leaves the choice to the session's default.
        partial = None if in_file_order else False
        self._window = self.form.declare(self._session, plan, partial=partial)
        self._session.on_wait = self._on_wait
        return self._window

    def _on_wait(self) -> None:
        """In a wait, call `check`, which may end the wait, and release the shards that are settled.

        Other readers may be waiting for the space of these shards.
        """
        self._check()
        if self._window is not None:
            self._window.release_settled()

    def close(self) -> None:
        """Release all shards."""
        if self._window is not None:
            self._window.empty()
