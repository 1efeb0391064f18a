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

# Long, as a daemon's packages may take many seconds to import on a node under load.
_START_TIMEOUT_S = 120.0
_SHOWN_CHARS = 1_000  # of the command's last messages
_SHARING_HINT = (
    "to share one among users: shardcache serve --cache-dir /path/on/local/disk --capacity 500GB"
)

# No thread may fork in the middle of `Popen`: the forked process, such as a worker of a DataLoader,
# would inherit the pipe whose end tells Popen that the command runs, and Popen would wait for that
# process to end.
_spawning = threading.RLock()
os.register_at_fork(
    before=_spawning.acquire,
    after_in_parent=_spawning.release,
    after_in_child=_spawning.release,
)


def ensure_started() -> Path:
    """Return the socket of the private daemon with this process's credentials; start it if needed.

    Of many processes that need it at once, one starts it, and the others wait.

    Raises DaemonError if its folder could be another user's, and the errors of `shardcache serve`;
    NoDaemonError if it was killed while it started, so that another try may succeed.
    """
    place = PrivatePlace.find()
    if is_listening(place.socket):
        return place.socket
    with locked(place.turn, _START_TIMEOUT_S):
        place = PrivatePlace.find()  # another process may have started one since
        if is_listening(place.socket):
            return place.socket
        return _start()


def _start() -> Path:
    """Start the private daemon, and return its socket."""
    outcome = _outcome(_spawn())
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


def _spawn() -> "subprocess.Popen[str]":
    """Begin the command that starts the private daemon, and then ends."""
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
    """Return the report of a start: the daemon that it has started or found, or an error."""
    try:
        with process:
            try:
                out, err = process.communicate(timeout=_START_TIMEOUT_S)
            finally:
                process.kill()  # unless it has ended
        return json.loads(out)
    except subprocess.TimeoutExpired:
        raise errors.DaemonError(
            f"the private daemon did not start within {_START_TIMEOUT_S:g} s",
        ) from None
    except ValueError:
        if process.returncode < 0:
            raise errors.NoDaemonError(
                f"the start of the private daemon was killed (signal {-process.returncode})",
            ) from None
        raise errors.DaemonError(
            f"the private daemon did not start: {err.strip()[-_SHOWN_CHARS:]}",
            remedy="shardcache serve --private",
        ) from None
