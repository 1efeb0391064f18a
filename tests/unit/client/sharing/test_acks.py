"""acks.py: who sent something learns that it has arrived, from any process of the family."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from shardcache.errors import ConfigError
from shardcache_client.sharing.acks import Acks


def in_fork(function: Callable[[], Any]) -> Any:
    """Run a function in a forked process and return what it returns."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(function()))
    process.start()
    process.join()
    return ours.recv()


def test_a_receipt_comes_once_it_is_handed_in() -> None:
    """From another process; the others that are waited for stay open."""
    acks = Acks()
    first, second = acks.expect(), acks.expect()
    in_fork(second.hand_in)
    assert not acks.came(first)
    assert acks.came(second)


def test_freed_place_starts_over() -> None:
    """However many are sent, only as many places are taken as there are under way; an old receipt changes nothing."""
    acks = Acks()
    cells = set()
    for _ in range(100):
        ack = acks.expect()
        ack.hand_in()
        assert acks.came(ack)
        cells.add(ack.cell)
    assert len(cells) == 1
    newer = acks.expect()
    ack.hand_in()
    assert not acks.came(newer)


def test_child_of_a_sender_has_its_own_places() -> None:
    """Forked from a process that waits for receipts, it takes none of that one's."""
    acks = Acks()
    acks.expect()
    theirs = in_fork(acks.expect)
    assert acks.expect().cell != theirs.cell


def test_the_places_are_free_when_their_process_has_ended() -> None:
    """A thousand workers one after the other take no more room than one."""
    acks = Acks()
    assert in_fork(acks.expect).cell == in_fork(acks.expect).cell


def test_the_places_are_kept_whatever_else_is_closed() -> None:
    """The kernel's lock is not lost with another descriptor of the same file, as a process's own locks would be."""
    acks = Acks()
    ours = acks.expect()
    for fd in memfds():
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    assert in_fork(acks.expect).cell != ours.cell


def test_a_copy_is_another() -> None:
    """Pickled for its own sake, it knows nothing of the first one's receipts, and was made here."""
    acks = Acks()
    other = pickle.loads(pickle.dumps(acks))
    ack = acks.expect()
    other.write(ack)
    assert not acks.came(ack)
    assert not other.inherited


def test_position_is_unknown_without_receipts() -> None:
    """When the dataset is gone, or was never here, the error says so."""
    acks = Acks()
    ack = acks.expect()
    del acks
    with pytest.raises(ConfigError, match=r"send bytes\(value\)"):
        ack.hand_in()


def test_nothing_is_left() -> None:
    """They have no name anywhere; their descriptors go with the object."""
    before = memfds()
    acks = Acks()
    acks.expect()
    assert len(memfds()) == len(before) + 2
    del acks
    assert memfds() == before


def memfds() -> list[str]:
    """Return this process's descriptors of files without a name, in order."""
    fds = os.listdir("/proc/self/fd")  # noqa: PTH208
    links = {fd: f"/proc/self/fd/{fd}" for fd in fds}
    return sorted(fd for fd, link in links.items() if os.path.lexists(link) and "memfd" in os.readlink(link))  # noqa: PTH115
