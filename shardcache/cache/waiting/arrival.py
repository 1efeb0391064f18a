"""Early access to a shard: readers can read it while it is still being downloaded.

Early access is for readers with nothing else to read. It is offered only if the origin checks the
version on every read. If the version were checked once, at the end, the beginning could be a mix of
several versions. Readers see the parts up to the first one that is not finished, and of that one
the bytes that have arrived. Each part is fetched with If-Match, and no byte of a part is written
before the header of its response has been checked. Only at the end of the download do the checks
show whether the whole shard is sound. So a reader may learn then that the beginning it has read
belongs to a corrupt shard.

A partial is the file that a shard is downloaded into. To publish a shard means to sync its files to
the disk, and to give them their names in the cache. Once a shard of any origin has passed every
check, readers with nothing else to read get its files before they are published. So no reader waits
for a disk that is slow to sync the files.

`Fetcher` offers and fills an `Arrival`, `Publisher` publishes it, and a connected reader reads it.
"""

from collections.abc import Callable

from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.waits import JobKey, Wait
from shardcache.fetch.reads import UnfinishedParts
from shardcache.shared.exceptions import CorruptShardError, DiskError, ShardcacheError
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard, UnpublishedFiles


class Arrival:
    """A shard that readers can open before it is published.

    Attributes:
        partial: the file that is being filled.
        readers: for each reader that has the file open, its job; None for a caller without a job.
        is_file: True once a reader reads the object's own bytes, which need not be a valid shard.
        files: the files of the whole shard, once they have passed every check; None before, and if
            the transfer fails.
        damage: damage that readers of `files` have to be warned of; None if there is none.
        shard: the shard once it is published.
        index_error: the error for which `shard` is a plain file without samples; None if the shard
            has samples, or nobody wanted samples.
    """

    def __init__(
        self,
        partial: Partial,
        waits: set[Wait],
        unfinished: UnfinishedParts,
        moved: Signal,
    ) -> None:
        """Offer early access to the shard that arrives in `partial`. See `Transfer.offer`.

        Args:
            partial: the file that is being filled.
            waits: all of the transfer's waits; waits for more of the beginning are added to them.
            unfinished: the parts that are being received, with the bytes of each written so far.
            moved: the transfer's signal, notified when more can be read.
        """
        self.partial = partial
        self.readers: list[JobKey | None] = []
        self.is_file = False
        self.files: UnpublishedFiles | None = None
        self.damage: CorruptShardError | None = None
        self.shard: Shard | None = None
        self.index_error: ShardcacheError | None = None
        self._waits = waits
        self._unfinished = unfinished
        self._moved = moved
        self._failure: ShardcacheError | None = None
        self._first_parts = 0  # number of finished parts without a gap, from the first part on
        self._ready_bytes = 0
        # Called once the last reader has closed the file, which takes space until then; None if
        # nothing has to be done.
        self._when_left: Callable[[], None] | None = None

    def __repr__(self) -> str:
        url = self.partial.obj.url
        readers = len(self.readers)
        return f"Arrival({url!r}, ready_bytes={self.ready_bytes}, readers={readers})"

    @property
    def ready_bytes(self) -> int:
        """Number of bytes, from the first on, that may be read."""
        partial = self.partial
        while self._first_parts in partial.done:
            self._first_parts += 1
        finished_bytes = min(self._first_parts * partial.part_bytes, partial.obj.size_bytes)
        # Parts are numbered from 0, so this is the number of the first unfinished one.
        part = self._first_parts
        written_bytes = finished_bytes + self._unfinished.written_bytes(part)
        # The number never falls. A part that is fetched again begins with no written bytes, but it
        # writes the same bytes to the same place: those that were ready can still be read.
        self._ready_bytes = max(self._ready_bytes, written_bytes)
        return self._ready_bytes

    def can_serve(self, wait: Wait) -> bool:
        """Return True if the reader that waits can begin to read before the shard is published."""
        if self._failure is not None:
            return False
        if self.files_for(wait) is not None:
            return True
        if not wait.accepts_partial:
            return False
        # The cached shard may have other bytes than those that arrive: a compressed tar is
        # decompressed first.
        if self.partial.may_be_inflated:
            return False
        # Once all bytes have arrived, only the checks are left to wait for.
        return 0 < self.ready_bytes < self.partial.obj.size_bytes

    def files_for(self, wait: Wait) -> UnpublishedFiles | None:
        """Return the checked files, if there are any and a wait accepts them unpublished.

        None for files without an index: a reader of samples needs one, so it waits until the shard
        is published and indexed.
        """
        if not wait.accepts_unpublished or self.files is None or self.files.facts.samples is None:
            return None
        return self.files

    async def wait_beyond(self, have_bytes: int, wait: Wait) -> None:
        """Wait for more than `have_bytes` of the beginning, or for the whole shard.

        Raises the transfer's error.

        Args:
            have_bytes: the number of bytes that the reader can read already.
            wait: the reader's wait, which is among the transfer's waits until this returns.
        """
        self._waits.add(wait)
        try:
            while not self._has_more(wait, have_bytes):
                if self._failure is not None:
                    raise self._failure
                await self._moved.wait()
        finally:
            self._waits.discard(wait)

    def _has_more(self, wait: Wait, have_bytes: int) -> bool:
        """Return whether there are more than `have_bytes` of the beginning, or the whole shard."""
        if self.shard is not None or self.files_for(wait) is not None:
            return True
        # The shard may be cached in another form, whose bytes `have_bytes` does not count.
        if self.partial.may_be_inflated:
            return False
        return self.ready_bytes > have_bytes

    def offer_files(self, files: UnpublishedFiles) -> None:
        """Announce that the shard has passed every check, and may be read."""
        self.files = files
        self._moved.notify()

    def publish(self, shard: Shard, index_error: ShardcacheError | None) -> None:
        """Announce that the shard is published. The caller has retained it for each reader.

        Args:
            shard: the shard.
            index_error: the error for which it has no index; None if there was none.
        """
        self.shard = shard
        self.index_error = index_error
        self._moved.notify()

    def fail(self, exn: ShardcacheError) -> None:
        """Announce that the rest will not arrive. Of several errors, readers get the first."""
        self._failure = self._failure or exn
        if self.files is not None and isinstance(exn, DiskError):
            # Readers have the files already. The kernel may drop pages that it could not write to
            # the disk. These readers would then find other bytes in the files, so they are warned.
            message = f"it could not be written to disk: {exn.message}"
            self.damage = CorruptShardError(message, url=exn.url)
        self.files = None
        self._moved.notify()

    def leave(self, client: JobKey) -> None:
        """Record that a reader has closed the file before it was published.

        Args:
            client: the reader's job.
        """
        self.readers.remove(client)
        if not self.readers and self._when_left is not None:
            self._when_left()

    def when_left(self, act: Callable[[], None]) -> None:
        """Call `act` once no reader has the file open; call it now if no reader has it open now."""
        if self.readers:
            self._when_left = act
        else:
            act()
