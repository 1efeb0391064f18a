"""epoch_counter.py: a count shared with workers alone, always whole, that leaves nothing."""

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.sharing.epoch_counter import Count, EpochCounter, Pass
from support.disks.shim import HAS_CC, Action, Op, Shim
from support.programs.guard import GUARD_S
from support.programs.processes import memfds

CHILDREN = 15
ROUNDS = 200
METHODS = ("fork", "spawn", "forkserver")


def everywhere() -> bool:
    """Take each child for a loader's worker."""
    return True


PASS = Pass(
    loader=2**62,
    nth=3,
    epoch=7,
    workers=1024,
    pid=2**22,
    is_resuming=True,
    joined=1 << 1023,
    read=5,
)


def test_count_goes_through_bytes() -> None:
    """As many passes as it keeps, the latest ones, each with all its workers."""
    passes = [replace(PASS, nth=nth) for nth in range(20)]
    count = Count(
        2**40,
        chosen=3,
        loads=2,
        is_resumed=True,
        workers=8,
        is_uncounted_logged=True,
        passes=passes,
    )
    packed = count.pack()
    assert len(packed) <= 4096
    assert Count.unpack(packed) == replace(count, passes=passes[-12:])
    assert Count.unpack(Count().pack()) == Count()


def _answer(counter: EpochCounter, pipe: Connection) -> None:
    pipe.send(counter.read())
    pipe.recv()
    pipe.send((counter.read(), counter.stored_states()))
    with counter.change() as count:
        count.next = 2**40
        count.passes = []


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_and_its_workers_see_what_the_others_count(method: str) -> None:
    """A worker reads what its trainer changes after it was started, and the other way round."""
    # By typeshed, only its subclasses have a Process.
    context: Any = multiprocessing.get_context(method)
    counter = EpochCounter(Count(3), everywhere)
    (here, there) = multiprocessing.Pipe()
    child = context.Process(target=_answer, args=(counter, there))
    child.start()
    assert here.recv() == Count(3)
    counter.store_states(b"a" * 10_000)
    with counter.change() as count:
        count.passes = [PASS]
    here.send(None)
    assert here.recv() == (Count(3, passes=[PASS]), b"a" * 10_000)
    child.join()
    assert counter.read() == Count(2**40)


def test_states_that_were_loaded_last_are_held() -> None:
    """Also if they are shorter than those before."""
    counter = EpochCounter()
    assert counter.stored_states() == b""
    for states in (b"long" * 10_000, b"short"):
        counter.store_states(states)
        assert counter.stored_states() == states
        assert counter.read() == Count()


def _count(counter: EpochCounter) -> None:
    for _ in range(ROUNDS):
        with counter.change() as count:
            count.next += 1


def test_threads_change_it_one_at_a_time_and_read_concurrently() -> None:
    """No note of several threads is lost, and readers find whole notes."""
    counter = EpochCounter()
    with ThreadPoolExecutor(4) as pool:
        edits = [pool.submit(_count, counter) for _ in range(3)]
        reads = [pool.submit(counter.read) for _ in range(ROUNDS)]
        for each in [*edits, *reads]:
            each.result()
    assert counter.read() == Count(3 * ROUNDS)


@pytest.mark.slow
def test_a_fork_in_the_middle_of_an_edit() -> None:
    """A child forked during an edit has whole notes, and waits for no lock of its parent."""
    counter = EpochCounter(in_worker=everywhere)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_count_once, args=(counter,)) for _ in range(CHILDREN)]
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        edits = pool.submit(_count_until, enough, counter)
        try:
            for child in children:
                child.start()
                child.join()
        finally:
            enough.set()
    assert {child.exitcode for child in children} == {0}
    assert counter.read() == Count(edits.result() + CHILDREN)


def _count_until(enough: threading.Event, counter: EpochCounter) -> int:
    edits = 0
    while not enough.is_set():
        _count_once(counter)
        edits += 1
    return edits


def _count_once(counter: EpochCounter) -> None:
    with counter.change() as count:
        count.next += 1


_EDIT = """
import sys
from shardcache_client.sharing.epoch_counter import Count, EpochCounter, Pass

class Inherited:
    def detach(self):
        return int(sys.argv[1])

counter = object.__new__(EpochCounter)
counter.__setstate__((Inherited(), int(sys.argv[2]), Count(), lambda: True))
while True:
    with counter.change() as count:
        count.next += 1
        count.passes = [Pass(count.next, 1, 0, 1, 0)] * 12
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CC, reason="cc is missing")
def test_a_process_that_is_killed_while_it_edits(tmp_path: Path) -> None:
    """A kill at any moment leaves the notes of one edit, and others go on with them."""
    counter = EpochCounter(in_worker=everywhere)
    shim = Shim(tmp_path / "control", Path("/memfd:shardcache-epochs (deleted)"))
    changes = 0
    (fd,) = counter._fds.values()
    for action in (Action.KILL_AFTER, Action.KILL_BEFORE, Action.KILL_HALF):
        for at in (1, 2):
            shim.arm(action, at=at, ops=(Op.WRITE,))
            changer = subprocess.run(
                [sys.executable, "-c", _EDIT, str(fd), str(os.getpid())],
                env=os.environ | shim.env(),
                pass_fds=[fd],
                check=False,
                timeout=GUARD_S,
            )
            assert changer.returncode == -signal.SIGKILL
            assert shim.acted == 1
            changes += (at if action is Action.KILL_AFTER else at - 1) // 2  # two writes each
            found = counter.read()
            expected = [Pass(changes, 1, 0, 1, 0)] * 12 if changes else []
            assert found == Count(changes, passes=expected), (action, at)
    assert changes == 1


def test_copied_count_is_independent() -> None:
    """Pickled or copied for its own sake, it starts with the same count and goes its own way."""
    counter = EpochCounter(Count(5))
    others = [pickle.loads(pickle.dumps(counter)), copy.deepcopy(counter)]
    with counter.change() as count:
        count.next = 6
    assert [other.read() for other in others] == [Count(5)] * 2


def test_a_change_that_fails_changes_nothing() -> None:
    """Earlier counts stay, and others can go on."""
    counter = EpochCounter(Count(5))
    with pytest.raises(ZeroDivisionError), counter.change() as count:
        count.next = 1 // 0
    assert counter.read() == Count(5)


def test_epoch_counter_leaves_no_descriptor_open() -> None:
    """The file has no name anywhere, and its descriptor goes with the object."""
    before = memfds()
    counter = EpochCounter()
    assert [memfds()[fd] for fd in memfds().keys() - before] == [
        "/memfd:shardcache-epochs (deleted)"
    ]
    del counter
    assert memfds() == before
