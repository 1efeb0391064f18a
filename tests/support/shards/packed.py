"""Streams of lengths packed into groups of blocks, by one rank or by several in step."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardcache_client.order.packing import Blocks, next_group
from support.programs.guard import GUARD_S


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of a group: the samples of each, by their number in the stream."""

    first: int  # number of its first sample
    read: int  # number of samples that were read before it was made
    blocks: Blocks


def groups(
    lengths: Sequence[int],
    max_tokens: int,
    window: int,
    first: int = 0,
    greatest: Callable[[int], int] = int,
    sources: Sequence[str] = (),
) -> Iterator[Group]:
    """Yield the groups of a stream, from the one that begins with sample `first`.

    With `sources`, one of each sample, those of different ones share no block.
    """
    while True:
        read = min(first + window, len(lengths))
        waiting = lengths[first:read]
        unread = len(lengths) - read
        waiting_sources = sources[first:read]
        blocks = next_group(
            waiting, unread, max_tokens, f"group/{first}", greatest, waiting_sources
        )
        if not blocks:
            return
        yield Group(first, read, [[first + place for place in block] for block in blocks])
        first += sum(map(len, blocks))


def in_step(
    ranks: Sequence[Sequence[int]],
    max_tokens: int,
    window: int,
    firsts: Sequence[int] = (),
) -> list[list[Group]]:
    """Return the groups of each rank, which agree on them. `ranks` are the lengths of each.

    `firsts` are the samples with which the ranks begin, by default their first.
    """
    meeting = Meeting(len(ranks))

    def pack_all(rank: int) -> list[Group]:
        first = firsts[rank] if firsts else 0
        with meeting:
            return [*groups(ranks[rank], max_tokens, window, first, meeting.seat(rank))]

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(pack_all, range(len(ranks))))


class Meeting:
    """Agreement of ranks in threads of one process on the greatest of their values.

    On leaving it by an error, a rank makes the others fail instead of waiting for it.
    """

    def __init__(self, ranks: int) -> None:
        self._values = [0] * ranks
        self._barrier = threading.Barrier(ranks, timeout=GUARD_S)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._barrier.abort()

    def seat(self, rank: int) -> Callable[[int], int]:
        """Return the function that gives a rank's value and waits for those of all ranks."""

        def greatest(value: int) -> int:
            self._values[rank] = value
            self._barrier.wait()
            found = max(self._values)
            self._barrier.wait()  # all have seen the values before anyone gives the next
            return found

        return greatest
