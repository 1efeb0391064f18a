"""Reading ahead, against a file in memory."""

import random
import tracemalloc

from shardcache_client.files.read_ahead import ReadAhead

BYTES = random.Random(1).randbytes(100_000)
BLOCK_BYTES = 8_000


class CountedFile:
    """A file in memory, and the ranges that were fetched of it.

    Args:
        has_next: whether the bytes that follow a read are there.
    """

    def __init__(self, *, has_next: bool = True) -> None:
        self._has_next = has_next
        self.fetched: list[tuple[int, int]] = []
        self.read_ahead = ReadAhead(BLOCK_BYTES, self._fetch, len(BYTES))

    def _fetch(self, start: int, stop: int, ahead_to: int) -> bytes:
        stop = max(stop, ahead_to) if self._has_next else stop
        self.fetched.append((start, stop))
        return BYTES[start:stop]

    def read(self, start: int, stop: int) -> bytes:
        """Read a range."""
        return self.read_ahead.read(start, stop).tobytes()


def test_scattered_reads_fetch_their_own_bytes() -> None:
    """A reader of a table or of weights jumps, and wants nothing of what lies between."""
    file = CountedFile()
    ranges = [(50_000, 50_100), (0, 8), (99_000, 100_000), (700, 800)]
    assert [file.read(*each) for each in ranges] == [BYTES[slice(*each)] for each in ranges]
    assert file.fetched == ranges


def test_reads_in_order_take_few_requests() -> None:
    """Each fetches as many bytes as were read before it, at most a block."""
    file = CountedFile()
    found = b"".join(file.read(at, at + 100) for at in range(0, len(BYTES), 100))
    assert found == BYTES
    assert len(file.fetched) < 30
    assert max(stop - start for start, stop in file.fetched) <= BLOCK_BYTES + 100


def test_bytes_that_are_not_there_yet_are_not_read_ahead() -> None:
    """Each read gets its own, and does not wait for others."""
    file = CountedFile(has_next=False)
    reads = [(at, at + 100) for at in range(0, 1_000, 100)]
    assert [file.read(*each) for each in reads] == [BYTES[slice(*each)] for each in reads]
    assert file.fetched == reads


def test_any_reads_give_the_files_bytes() -> None:
    """In any order, overlapping or not, beyond the end as well."""
    chance = random.Random(2)
    file = CountedFile()
    at = 0
    for _ in range(2_000):
        if chance.random() < 0.3:
            at = chance.randrange(len(BYTES) + 100)
        stop = at + chance.randrange(3_000)
        assert file.read(at, stop) == BYTES[at:stop]
        at = min(stop, len(BYTES))


def test_large_read_is_in_memory_once() -> None:
    """Tensors have gigabytes: what is fetched is not copied, and not kept."""
    file = CountedFile()
    file.read(0, 10)  # the next read continues this one, and more than its bytes is fetched
    tracemalloc.start()
    try:
        read = file.read_ahead.read(10, 80_010)
        _, peak_bytes = tracemalloc.get_traced_memory()
        assert read.nbytes == 80_000
        del read
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.5 * 80_000
    assert kept_bytes < 3 * BLOCK_BYTES
