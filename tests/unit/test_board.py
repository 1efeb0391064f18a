"""board.py: notes that a process and its children share, and that leave nothing behind."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

import pytest

from shardcache_client.sharing.board import Board

ROUNDS = 200


def _answer(board: Board, pipe: Connection) -> None:
    pipe.send(board.read())
    pipe.recv()
    pipe.send(board.read())
    with board.edit() as notes:
        notes.clear()
        notes["child"] = [2**40]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_living_processes_see_what_the_others_note(method: str) -> None:
    """A child reads what its parent notes after it was started, and the other way round."""
    context: Any = multiprocessing.get_context(method)  # typeshed: only its subclasses have a Process
    board, (here, there) = Board({"next": 3}), multiprocessing.Pipe()
    child = context.Process(target=_answer, args=(board, there))
    child.start()
    assert here.recv() == {"next": 3}
    with board.edit() as notes:
        notes["more"] = "a" * 10_000
    here.send(None)
    assert here.recv() == {"next": 3, "more": "a" * 10_000}
    child.join()
    assert board.read() == {"child": [2**40]}


def _count(board: Board) -> None:
    for _ in range(ROUNDS):
        with board.edit() as notes:
            notes["count"] += 1


def test_one_process_edits_at_a_time() -> None:
    """Nothing that several processes note at once is lost."""
    board = Board({"count": 0})
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_count, args=(board,)) for _ in range(3)]
    for child in children:
        child.start()
    _count(board)
    for child in children:
        child.join()
    assert board.read() == {"count": 4 * ROUNDS}


def test_a_copy_is_a_board_of_its_own() -> None:
    """Pickled or copied for its own sake, it starts with the same notes and goes its own way."""
    board = Board({"next": 5})
    others = [pickle.loads(pickle.dumps(board)), copy.deepcopy(board)]
    with board.edit() as notes:
        notes["next"] = 6
    assert [other.read() for other in others] == [{"next": 5}] * 2


def test_an_edit_that_fails_changes_nothing() -> None:
    """What was noted before stays, and others can go on."""
    board = Board({"next": 5})
    with pytest.raises(ZeroDivisionError), board.edit() as notes:
        notes["next"] = 1 // 0
    with board.edit() as notes:
        assert notes == {"next": 5}


def test_nothing_is_left() -> None:
    """The board's file has no name anywhere, and its descriptor goes with the object."""
    before = files_in_memory()
    board = Board()
    assert files_in_memory() == [*before, "/memfd:shardcache-board (deleted)"]
    del board
    assert files_in_memory() == before


def files_in_memory() -> list[str]:
    """Return what this process's descriptors of memfds are called."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]  # noqa: PTH208
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]  # noqa: PTH115
    return [target for target in targets if "memfd" in target]
