"""The start of this user's private daemon.

A private daemon belongs to one user, and needs no setup: the first process that wants it starts it
by the command `shardcache serve --private`. `DaemonLink` calls `ensure_started` before it connects.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from shardcache.shared import exceptions
from shardcache.shared.private import PrivatePlace, is_listening, locked

log = logging.getLogger("shardcache")

# Time limit of a start. It is long because a daemon's packages may take many seconds to import on a
# node under load.
_START_TIMEOUT_S = 120.0
# Number of characters of the start command's last messages that an error shows.
_SHOWN_CHARS = 1_000
_SHARING_HINT = (
    "to share one among users: shardcache serve --cache-dir /path/on/local/disk --capacity 500GB"
)

# Held during `Popen` and during every fork, so that no thread forks in the middle of `Popen`. Popen
# waits until its command runs, when the last copy of an internal pipe is closed. A process forked
# in between, such as a DataLoader's worker, would have a copy, and Popen would wait for its end.
_spawning = threading.RLock()
os.register_at_fork(
    before=_spawning.acquire,
    after_in_parent=_spawning.release,
    after_in_child=_spawning.release,
)


def ensure_started() -> Path:
    """Return the socket of the private daemon of this process's user; start it if needed.

    If many processes need the daemon at the same time, one starts it, and the others wait.

    Raises DaemonError if another user could own the daemon's folder, and the errors of
    `shardcache serve`; NoDaemonError if the daemon was killed while it started, so that another try
    may succeed.
    """
    place = PrivatePlace.find()
    if is_listening(place.socket):
        return place.socket
    with locked(place.start_lock, _START_TIMEOUT_S):
        # Another process may have started the daemon while this one waited for the lock. The
        # daemon's socket may be at another place then, so the place is found again.
        place = PrivatePlace.find()
        if is_listening(place.socket):
            return place.socket
        return _start()


def _start() -> Path:
    """Start the private daemon, and return its socket."""
    outcome = _outcome_of(_spawn())
    if "error" in outcome:
        raise exceptions.from_json(outcome["error"])
    if outcome["started"]:
        log.warning(
            "started a private shardcache daemon: cache in %s, up to %.3g GB; to stop it: "
            "shardcache stop; %s",
            outcome["cache_dir"],
            outcome["capacity_bytes"] / 1e9,
            _SHARING_HINT,
        )
    return Path(outcome["socket"])


def _spawn() -> "subprocess.Popen[str]":
    """Run the command that starts the private daemon. The command ends; the daemon stays."""
    command = [sys.executable, "-P", "-m", "shardcache", "serve", "--private", "--json"]
    with _spawning:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # the dynamic linker may write paths that are not text
            # No signal to this job's process group reaches the daemon, even while it starts.
            start_new_session=True,
        )


def _outcome_of(process: "subprocess.Popen[str]") -> Any:
    """Return the start command's report: the daemon that it has started or found, or an error.

    Raises DaemonError or NoDaemonError if the command does not report anything.
    """
    with process:
        try:
            out, err = process.communicate(timeout=_START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise exceptions.DaemonError(
                f"the private daemon did not start within {_START_TIMEOUT_S:g} s",
            ) from None
        finally:
            process.kill()  # has no effect on a command that has ended

    try:
        return json.loads(out)
    except ValueError:  # the command ended before its report
        if process.returncode < 0:
            raise exceptions.NoDaemonError(
                f"the start of the private daemon was killed (signal {-process.returncode})",
            ) from None
        raise exceptions.DaemonError(
            f"the private daemon did not start: {err.strip()[-_SHOWN_CHARS:]}",
            remedy="shardcache serve --private",
        ) from None
