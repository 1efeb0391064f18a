"""shared_notes.py: notes that a trainer shares with its workers alone, whole at any moment; nothing is left behind."""

import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.sharing.shared_notes import SharedNotes
from support.disks.shim import HAS_CC, Action, Op, Shim
from support.programs.guard import GUARD_S
from support.programs.processes import memfds

CHILDREN = 15
ROUNDS = 200
METHODS = ("fork", "spawn", "forkserver")


def everywhere() -> bool:
    """Take each child for a loader's worker."""
    return True


def _answer(shared_notes: SharedNotes, pipe: Connection) -> None:
    pipe.send(shared_notes.read())
    pipe.recv()
    pipe.send(shared_notes.read())
    with shared_notes.edit() as notes:
        notes.clear()
        notes["child"] = [2**40]


@pytest.mark.parametrize("method", METHODS)
def test_a_trainer_and_its_workers_see_what_the_others_note(method: str) -> None:
    """A worker reads what its trainer notes after it was started, and the other way round."""
    context: Any = multiprocessing.get_context(method)  # typeshed: only its subclasses have a Process
    shared_notes, (here, there) = SharedNotes({"next": 3}, everywhere), multiprocessing.Pipe()
    child = context.Process(target=_answer, args=(shared_notes, there))
    child.start()
    assert here.recv() == {"next": 3}
    with shared_notes.edit() as notes:
        notes["more"] = "a" * 10_000
    here.send(None)
    assert here.recv() == {"next": 3, "more": "a" * 10_000}
    child.join()
    assert shared_notes.read() == {"child": [2**40]}


def _count(shared_notes: SharedNotes) -> None:
    for _ in range(ROUNDS):
        with shared_notes.edit() as notes:
            notes["count"] += 1


def test_threads_edit_one_at_a_time_and_read_concurrently() -> None:
    """Nor is anything lost that several threads of one process note, and who reads finds whole notes."""
    shared_notes = SharedNotes({"count": 0})
    with ThreadPoolExecutor(4) as pool:
        edits = [pool.submit(_count, shared_notes) for _ in range(3)]
        reads = [pool.submit(shared_notes.read) for _ in range(ROUNDS)]
        for each in [*edits, *reads]:
            each.result()
    assert shared_notes.read() == {"count": 3 * ROUNDS}


def test_a_fork_in_the_middle_of_an_edit() -> None:
    """A child that is forked while another thread edits has whole notes, and neither waits for the other's lock."""
    shared_notes = SharedNotes({"count": 0}, everywhere)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_count_once, args=(shared_notes,)) for _ in range(CHILDREN)]
    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        edits = pool.submit(_count_until, enough, shared_notes)
        try:
            for child in children:
                child.start()
                child.join()
        finally:
            enough.set()
    assert {child.exitcode for child in children} == {0}
    assert shared_notes.read() == {"count": edits.result() + CHILDREN}


def _count_until(enough: threading.Event, shared_notes: SharedNotes) -> int:
    edits = 0
    while not enough.is_set():
        _count_once(shared_notes)
        edits += 1
    return edits


def _count_once(shared_notes: SharedNotes) -> None:
    with shared_notes.edit() as notes:
        notes["count"] += 1


_EDIT = """
import sys
from shardcache_client.sharing.shared_notes import SharedNotes, _attach

class Inherited:
    def detach(self):
        return int(sys.argv[1])

state = _attach(Inherited(), int(sys.argv[2]), {}, lambda: True)
while True:
    with state.edit() as notes:
        notes["count"] += 1
        notes["fill"] = str(notes["count"] % 10) * 10_000
"""


@pytest.mark.skipif(not HAS_CC, reason="cc is missing")
def test_a_process_that_is_killed_while_it_edits(tmp_path: Path) -> None:
    """Before, in the middle of and after a write: the notes are those of one edit, and others go on with them."""
    shared_notes = SharedNotes({"count": 0, "fill": ""}, everywhere)
    shim = Shim(tmp_path / "control", Path("/memfd:shardcache-notes (deleted)"))
    edits, (fd,) = 0, shared_notes._fds.values()
    for action in (Action.KILL_AFTER, Action.KILL_BEFORE, Action.KILL_HALF):
        for at in (1, 2):
            shim.arm(action, at=at, ops=(Op.WRITE,))
            editor = subprocess.run(
                [sys.executable, "-c", _EDIT, str(fd), str(os.getpid())],
                env=os.environ | shim.env(),
                pass_fds=[fd],
                check=False,
                timeout=GUARD_S,
            )
            assert (editor.returncode, shim.acted) == (-signal.SIGKILL, 1)
            edits += (at if action is Action.KILL_AFTER else at - 1) // 2  # two writes each
            found = shared_notes.read()
            assert found == {"count": edits, "fill": str(edits) * 10_000 if edits else ""}, (action, at)
    assert edits == 1


def test_copied_state_is_independent() -> None:
    """Pickled or copied for its own sake, it starts with the same notes and goes its own way."""
    shared_notes = SharedNotes({"next": 5})
    others = [pickle.loads(pickle.dumps(shared_notes)), copy.deepcopy(shared_notes)]
    with shared_notes.edit() as notes:
        notes["next"] = 6
    assert [other.read() for other in others] == [{"next": 5}] * 2


def test_an_edit_that_fails_changes_nothing() -> None:
    """Notes made before stay, and others can go on."""
    shared_notes = SharedNotes({"next": 5})
    with pytest.raises(ZeroDivisionError), shared_notes.edit() as notes:
        notes["next"] = 1 // 0
    with shared_notes.edit() as notes:
        assert notes == {"next": 5}


def test_nothing_is_left() -> None:
    """The file has no name anywhere, and its descriptor goes with the object."""
    before = memfds()
    shared_notes = SharedNotes()
    assert [memfds()[fd] for fd in memfds().keys() - before] == ["/memfd:shardcache-notes (deleted)"]
    del shared_notes
    assert memfds() == before
