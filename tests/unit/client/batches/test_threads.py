"""threads.py: order, limits, errors in their place, and no thread left behind."""

import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator

import pytest

from shardcache_client.batches.threads import AbandonedError, made_by_threads
from support.programs.guard import GUARD_S

Check = Callable[[], None]


def each(items: Iterable[int]) -> Callable[[Check], Generator[int]]:
    """Return a function that reads these items."""

    def read(check: Check) -> Generator[int]:
        yield from items

    return read


def doubled(read: Iterable[int], *, threads: int = 2, ahead: int = 4) -> Iterator[int]:
    """Return the doubles of what is read, made by threads."""
    return made_by_threads(each(read), lambda number: 2 * number, threads=threads, ahead=ahead)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_batches_come_in_the_order_of_reading(threads: int, ahead: int) -> None:
    """However many threads make them."""
    assert list(doubled(range(100), threads=threads, ahead=ahead)) == list(range(0, 200, 2))
    assert list(doubled([], threads=threads, ahead=ahead)) == []


def test_a_slow_batch_is_waited_for() -> None:
    """The next ones are made meanwhile, and come after it."""
    others_are_made = threading.Event()
    made: list[int] = []

    def make(number: int) -> int:
        if number == 0:
            assert others_are_made.wait(GUARD_S)
        made.append(number)
        if len(made) == 3:
            others_are_made.set()
        return number

    assert list(made_by_threads(each(range(4)), make, threads=2, ahead=4)) == [0, 1, 2, 3]
    assert made[-1] == 0 or made.index(0) >= 3


def test_a_limited_number_is_read_ahead() -> None:
    """No more than `ahead` beyond those that have been taken."""
    read: list[int] = []

    def numbers(check: Check) -> Generator[int]:
        for number in range(100):
            read.append(number)
            yield number

    batches = made_by_threads(numbers, lambda number: number, threads=2, ahead=3)
    for taken, _ in enumerate(batches, 1):
        assert len(read) <= taken + 3


def test_an_error_of_reading_comes_after_the_batches_before_it() -> None:
    """As if everything was done in one thread."""

    def numbers(check: Check) -> Generator[int]:
        yield from range(3)
        raise OSError("the disk is gone")

    batches = made_by_threads(numbers, lambda number: number, threads=2, ahead=8)
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert list(batches) == []


def test_an_error_of_making_comes_in_the_place_of_its_batch() -> None:
    """Later batches may be made already, and are not yielded."""

    def make(number: int) -> int:
        if number == 2:
            raise ValueError("no image")
        return number

    batches = made_by_threads(each(range(9)), make, threads=3, ahead=8)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="no image"):
        next(batches)
    assert list(batches) == []


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_dropped_iterator_leaves_no_thread(taken: int) -> None:
    """No matter if a batch was taken; and the generator that is read is closed."""
    before = threading.active_count()
    is_closed = threading.Event()

    def numbers(check: Check) -> Generator[int]:
        try:
            yield from range(1000)
        finally:
            is_closed.set()

    batches = made_by_threads(numbers, lambda number: number, threads=3, ahead=4)
    for _ in range(taken):
        next(batches)
    del batches
    assert threading.active_count() == before
    assert is_closed.is_set() == (taken > 0)


def test_a_thread_that_waits_learns_that_nobody_takes_its_batches() -> None:
    """The function that it gets raises then, for it to give up what it holds."""
    outcome: list[BaseException] = []
    waits = threading.Event()

    def numbers(check: Check) -> Generator[int]:
        yield 0
        try:
            while True:
                waits.set()
                check()
        except AbandonedError as exn:
            outcome.append(exn)
            raise

    batches = made_by_threads(numbers, lambda number: number, threads=1, ahead=4)
    assert next(batches) == 0
    assert waits.wait(GUARD_S)
    batches.close()
    assert len(outcome) == 1


def test_a_script_ends_though_it_holds_an_iterator() -> None:
    """Its threads do not keep the process alive."""
    script = """
from shardcache_client.batches.threads import made_by_threads
numbers = lambda check: (number for number in range(10**9))
batches = made_by_threads(numbers, lambda number: number, threads=2, ahead=4)
print(next(batches))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=GUARD_S, check=True
    )
    assert ran.stdout == "0\n"
    assert ran.stderr == ""
