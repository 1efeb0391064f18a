"""Early access to a shard: it can be read while it is still being downloaded.

It is for readers with nothing else to read, and only for origins that check the version on every
read: if it were checked once, at the end, the beginning could be of several versions. Readers see
the contiguous finished parts from the first byte on, and the beginning of the part after them. Each
part is fetched with If-Match, and nothing of it is written before the answer's header proves to be
the expected one. Whether the whole shard is sound is known only at the end, so a reader may learn
then that the beginning it read belongs to a corrupt shard.

Once a shard of any origin has passed every check, readers with nothing else to read get its files
before these are published: a disk that is slow to sync them delays nobody.
"""

from collections.abc import Callable

from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.waits import JobKey, Wait
from shardcache.errors import CorruptShardError, DiskError, ShardcacheError
from shardcache.fetch.reads import Coming
from shardcache.store.partial import Partial
from shardcache.store.shard import Shard, Unpublished


class Arrival:
    """A shard that readers can open before it is published.

    Attributes:
        partial: the file that is being filled.
        readers: the job of each reader that has the file open.
        is_file: True once one of them reads the object's own bytes, whatever they are.
        files: the checked files of the whole shard, before they are published; None until then, and
            if the transfer fails.
        damage: damage that readers of `files` have to be warned of.
        shard: the shard once it is published.
        refused: if `shard` is a plain file, why it has no samples.
    """

    def __init__(self, partial: Partial, waits: set[Wait], coming: Coming, moved: Signal) -> None:
        """Offer early access to the shard that arrives in `partial`. See `Transfer.offer`.

        Args:
            waits: all of the transfer's waits.
            coming: the requests for the parts in progress.
            moved: the transfer's signal, notified when more can be read.
        """
        self.partial = partial
        self.readers: list[JobKey | None] = []
        self.is_file = False
        self.files: Unpublished | None = None
        self.damage: CorruptShardError | None = None
        self.shard: Shard | None = None
        self.refused: ShardcacheError | None = None
        self._waits = waits
        self._coming = coming
        self._moved = moved
        self._failure: ShardcacheError | None = None
        self._first_parts = 0  # finished parts without a gap, from the first one on
        self._ready_bytes = 0
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
        unfinished = self._first_parts
        written_bytes = finished_bytes + self._coming.written_bytes(unfinished)
        # Never less than before: a part that is fetched again writes the same bytes to the same
        # place.
        self._ready_bytes = max(self._ready_bytes, written_bytes)
        return self._ready_bytes

    def is_worth(self, wait: Wait) -> bool:
        """Return True if the reader that waits can begin to read before the shard is published."""
        if self._failure is not None:
            return False
        if self.files_for(wait) is not None:
            return True
        if not wait.partial:  # it accepts only a whole shard
            return False
        # The shard's bytes may differ from those that arrive, such as a compressed tar's.
        if self.partial.may_be_copied:
            return False
        # Once all bytes have arrived, only the checks are left to wait for.
        return 0 < self.ready_bytes < self.partial.obj.size_bytes

    def files_for(self, wait: Wait) -> Unpublished | None:
        """Return the checked files, if a wait accepts them before they are published.

        None for files without samples: a reader of samples has them indexed first.
        """
        if not wait.unpublished or self.files is None or self.files.facts.samples is None:
            return None
        return self.files

    async def wait_beyond(self, have_bytes: int, wait: Wait) -> None:
        """Wait for more than `have_bytes` of the beginning, or for the whole shard.

        Raises the transfer's error.
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
        if self.partial.may_be_copied:  # `have_bytes` may be of a file with other bytes
            return False
        return self.ready_bytes > have_bytes

    def offer_files(self, files: Unpublished) -> None:
        """Announce that the shard has passed every check, and may be read."""
        self.files = files
        self._moved.notify()

    def publish(self, shard: Shard, refused: ShardcacheError | None) -> None:
        """Announce that the shard is complete. The caller has retained it for each reader."""
        self.shard = shard
        self.refused = refused
        self._moved.notify()

    def fail(self, exn: ShardcacheError) -> None:
        """Announce that the rest will not arrive. Of several reasons, the first is reported."""
        self._failure = self._failure or exn
        if self.files is not None and isinstance(exn, DiskError):
            # The kernel may drop pages that it could not write: readers may then find other bytes.
            message = f"it could not be written to disk: {exn.message}"
            self.damage = CorruptShardError(message, url=exn.url)
        self.files = None
        self._moved.notify()

    def leave(self, client: JobKey) -> None:
        """Note that a reader of a job closed the file before it was published."""
        self.readers.remove(client)
        if not self.readers and self._when_left is not None:
            self._when_left()

    def when_left(self, act: Callable[[], None]) -> None:
        """Call `act` once no reader has the file open."""
        if self.readers:
            self._when_left = act
        else:
            act()
