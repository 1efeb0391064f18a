"""Parts of an object that are retained for those who wait for ranges of it.

A range can have several parts, which arrive one after another. To retain a part is to keep it from
being evicted (`PartResidency`). None of the parts may be evicted before the caller that waits has
all of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from shardcache.cache.space.part_residency import PartResidency
from shardcache.cache.waiting.waits import Wait
from shardcache.store.part_file import PartFile


class RetainedParts:
    """The parts of one file that are retained for waits, by wait and by part.

    Args:
        residency: retains and releases the parts.
        file: the file of parts.

    Attributes:
        file: the file of parts.
    """

    def __init__(self, residency: PartResidency, file: PartFile) -> None:
        self.file = file
        self._residency = residency
        self._parts: dict[Wait, set[int]] = {}  # the retained parts of each wait
        self._waits: defaultdict[int, list[Wait]] = defaultdict(list)  # by each part they need

    def __contains__(self, wait: Wait) -> bool:
        """Return whether parts are retained for a wait, or will be once they arrive."""
        return wait in self._parts

    def parts_of(self, wait: Wait) -> range:
        """Return the numbers of the parts that a wait needs; none for a wait for the whole."""
        return range(0) if wait.bytes is None else self.file.parts_of(wait.bytes)

    def retain(self, wait: Wait) -> None:
        """Retain the cached parts of a wait until the wait ends, and further ones in `arrived`."""
        if wait not in self._parts:
            self._parts[wait] = set()
            wait.on_end = lambda: self.release(wait)
            for part in self.parts_of(wait):
                self._waits[part].append(wait)
        done = self.file.partial.done
        self._retain_more(wait, [part for part in self.parts_of(wait) if part in done])

    def arrived(self, part: int) -> Sequence[Wait]:
        """Retain a part that has arrived for those waits that need it; return these waits."""
        waits = self._waits.get(part, [])
        for wait in waits:
            self._retain_more(wait, [part])
        return waits

    def release(self, wait: Wait) -> None:
        """Release the parts of a wait. No-op if none are retained for it."""
        retained = self._parts.pop(wait, None)
        wait.on_end = None
        if retained is None:
            return
        for part in self.parts_of(wait):
            self._waits[part].remove(wait)
            if not self._waits[part]:
                del self._waits[part]
        if retained:
            self._residency.release(self.file, retained)

    def release_all(self) -> None:
        """Release the parts of all waits."""
        for wait in list(self._parts):
            self.release(wait)

    def _retain_more(self, wait: Wait, parts: Iterable[int]) -> None:
        """Retain further parts for a wait, except those that are retained for it already."""
        retained = self._parts[wait]
        new = [part for part in parts if part not in retained]
        retained.update(new)
        self._residency.retain(self.file, new)
