"""acks.py: who sent something learns that it has arrived, from any process of the family."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from shardcache_client.sharing.handover import Acks


def in_fork(function: Callable[[], Any]) -> Any:
    """Run a function in a forked process and return what it returns."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(function()))
    process.start()
    process.join()
    return ours.recv()


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
