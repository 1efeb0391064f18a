"""The start of this user's private daemon."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from shardcache import errors
from shardcache.shared.private import PrivatePlace, is_listening, locked

log = logging.getLogger("shardcache")

# On a node under load, the packages of a daemon take seconds to import.
_START_S = 120.0
_SHARING_HINT = (
    "to share one among users: shardcache serve --cache-dir /path/on/local/disk --capacity 500GB"
)

# A process that another thread forks in the middle of `Popen`, such as a worker of a DataLoader,
# would inherit the pipe by whose end Popen notices that the command runs, and keep it open: Popen
# would wait for that process's end.
_spawning = threading.RLock()
os.register_at_fork(
    before=_spawning.acquire,
    after_in_parent=_spawning.release,
    after_in_child=_spawning.release,
)


def ensure_started() -> Path:
    """Return the socket of the private daemon with this process's credentials; start it if needed.

    Of many processes that need it at once, one starts it, and the others wait. Raises DaemonError
    if its folder could be another user's, and the errors of `shardcache serve`; NoDaemonError if it
    was killed while it started, which another try mends.
    """
    place = PrivatePlace.find()
    if is_listening(place.socket):
        return place.socket
    with locked(place.turn, _START_S):
        place = PrivatePlace.find()  # another process may have started one since
        if is_listening(place.socket):
            return place.socket
        return _start()


def _start() -> Path:
    outcome = _outcome(_spawned())
    if "error" in outcome:
        raise errors.from_json(outcome["error"])
    if outcome["started"]:
        log.warning(
            "started a private shardcache daemon: cache in %s, up to %.3g GB; to stop it: "
            "shardcache stop; %s",
            outcome["cache_dir"],
            outcome["capacity_bytes"] / 1e9,
            _SHARING_HINT,
        )
    return Path(outcome["socket"])


def _spawned() -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", "shardcache", "serve", "--private", "--json"]
    with _spawning:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # No signal to this job's processes reaches it, even while it starts.
            start_new_session=True,
        )


def _outcome(process: "subprocess.Popen[str]") -> Any:
    """Return what a start reports: the daemon that it has started or found, or an error."""
    try:
        with process:
            try:
                out, err = process.communicate(timeout=_START_S)
            finally:
                process.kill()  # unless it has ended
        return json.loads(out)
    except subprocess.TimeoutExpired:
        raise errors.DaemonError(
            f"the private daemon did not start within {_START_S:g} s",
        ) from None
    except ValueError:
        if process.returncode < 0:
            raise errors.NoDaemonError(
                f"the start of the private daemon was killed (signal {-process.returncode})",
            ) from None
        raise errors.DaemonError(
            f"the private daemon did not start: {err.strip()[-1000:]}",
            remedy="shardcache serve --private",
        ) from None
