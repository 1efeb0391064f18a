"""epoch.py: one number seen by a process and its children, which leaves nothing behind."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

import pytest

from shardcache_client.epoch import SharedEpoch


def _report(epoch: SharedEpoch, pipe: Connection) -> None:
    pipe.send(epoch.get())
    pipe.recv()
    pipe.send(epoch.get())
    epoch.set(2**40)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_living_child_sees_the_epoch_change(method: str) -> None:
    """A worker that was started in one epoch reads the number of the next, and the other way round."""
    context: Any = multiprocessing.get_context(method)  # typeshed: only its subclasses have a Process
    epoch, (here, there) = SharedEpoch(3), multiprocessing.Pipe()
    child = context.Process(target=_report, args=(epoch, there))
    child.start()
    assert here.recv() == 3
    epoch.set(4)
    here.send(None)
    assert here.recv() == 4
    child.join()
    assert epoch.get() == 2**40


def test_a_copy_is_a_number_of_its_own() -> None:
    """Pickled or copied for its own sake, a number starts from the value and goes its own way."""
    epoch = SharedEpoch(5)
    for other in (pickle.loads(pickle.dumps(epoch)), copy.deepcopy(epoch)):
        epoch.set(6)
        assert other.get() == 5
        epoch.set(5)


def test_nothing_is_left() -> None:
    """The number's file has no name anywhere, and its descriptor goes with the object."""
    before = files_in_memory()
    epoch = SharedEpoch()
    assert files_in_memory() == [*before, "/memfd:shardcache-epoch (deleted)"]
    del epoch
    assert files_in_memory() == before


def files_in_memory() -> list[str]:
    """Return what this process's descriptors of memfds are called."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]  # noqa: PTH208
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]  # noqa: PTH115
    return [target for target in targets if "memfd" in target]
