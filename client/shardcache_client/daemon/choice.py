"""Choice of the daemon that serves a reader, the node's or this user's private one, and the patience with it."""

import json
import logging
import math
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from shardcache import errors
from shardcache.private import PrivatePlace, is_listening, locked, node_has_daemon
from shardcache.protocol import socket_path
from shardcache.unix_socket import health

log = logging.getLogger("shardcache")

T = TypeVar("T")
Which: TypeAlias = Literal["auto", "node", "private"]
Fallback: TypeAlias = Literal["error", "private"]

# On a node under load, the packages of a daemon take seconds to import.
_START_S = 120.0
_NEEDED = ("aiohttp", "click", "diskcache", "fsspec", "pydantic", "structlog")
_SHARED = "to share one among users: shardcache serve --cache-dir /path/on/local/disk --capacity 500GB"

_HEALTH_TIMEOUT_S = 2.0
# How often a waiting reader calls `on_wait` and checks that its training process still runs.
_LOOK_UP_S = 1.0
# How long the reason of a wait that is over is waited for: a daemon that runs gives it immediately.
_LAST_REASON_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# An announced restart deserves a warning only if it takes longer than restarts usually do.
_QUIET_S = 10.0
# Not Python's global generator: ranks seed that alike, and training depends on its sequence.
_random = random.SystemRandom()

# A process that another thread forks in the middle of `Popen`, such as a worker of a DataLoader, would inherit the pipe
# by whose end Popen notices that the command runs, and keep it open: Popen would wait for that process's end.
_spawning = threading.RLock()
os.register_at_fork(before=_spawning.acquire, after_in_parent=_spawning.release, after_in_child=_spawning.release)


@dataclass(frozen=True, slots=True)
class DaemonChoice:
    """The daemon that serves a reader: the one at the node's socket, or the private one if that is None.

    With `fallback`, the private one serves while the node's cannot.
    """

    node: Path | None
    fallback: bool = False

    @classmethod
    def of(
        cls, socket: str | os.PathLike[str] | None = None, daemon: Which = "auto", fallback: Fallback = "error"
    ) -> "DaemonChoice":
        """Return the choice that a user's arguments describe. Raises ConfigError."""
        if socket is not None and daemon == "private":
            raise errors.ConfigError(
                "socket and daemon='private' exclude each other", remedy='omit socket, or daemon="private"'
            )
        is_private = daemon == "private" or (daemon == "auto" and socket is None and not node_has_daemon())
        if is_private or fallback == "private":
            _check_installed()
        return cls(None) if is_private else cls(socket_path(socket), fallback == "private")

    def node_status(self) -> str | None:
        """Return the status that the node's daemon reports, "ok" if it is well.

        None if it does not answer.
        """
        assert self.node is not None
        with suppress(OSError, ValueError):
            return str(health(self.node, _HEALTH_TIMEOUT_S)["status"])
        return None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that describe this choice."""
        if self.node is None:
            return {"daemon": "private"}
        return {"socket": self.node, "fallback": "private" if self.fallback else "error"}


def _check_installed() -> None:
    missing = next((name for name in _NEEDED if find_spec(name) is None), None)
    if missing is not None:
        raise errors.ConfigError(
            f"no daemon is set up on this node, and this environment cannot start one: {missing} is not installed",
            remedy="pip install 'shardcache[daemon]'; or start the node's daemon, and set SHARDCACHE_SOCKET",
        )


def ensure_started() -> Path:
    """Return the socket of the private daemon with this process's credentials; start it unless it runs.

    Of many processes that need it at once, one starts it, and the others wait. Raises DaemonError if its folder could
    be another user's, and the errors of `shardcache serve`; NoDaemonError if it was killed while it started, which
    another try mends.
    """
    place = PrivatePlace.find()
    if is_listening(place.socket):
        return place.socket
    with locked(place.folder, _START_S):
        place = PrivatePlace.find()  # another process may have started one since
        if is_listening(place.socket):
            return place.socket
        return _start()


def _start() -> Path:
    command = [sys.executable, "-P", "-m", "shardcache", "serve", "--private", "--json"]
    pipe = subprocess.PIPE
    with _spawning:
        # A session of its own: no signal to this job's processes reaches it, even while it starts.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
    try:
        with process:
            try:
                out, err = process.communicate(timeout=_START_S)
            finally:
                process.kill()  # unless it has ended
        outcome = json.loads(out)
    except subprocess.TimeoutExpired:
        raise errors.DaemonError(f"the private daemon did not start within {_START_S:g} s") from None
    except ValueError:
        if process.returncode < 0:
            raise errors.NoDaemonError(
                f"the start of the private daemon was killed (signal {-process.returncode})"
            ) from None
        raise errors.DaemonError(
            f"the private daemon did not start: {err.strip()[-1000:]}", remedy="shardcache serve --private"
        ) from None
    if "error" in outcome:
        raise errors.from_json(outcome["error"])
    if outcome["started"]:
        log.warning(
            "started a private shardcache daemon: cache in %s, up to %.3g GB; to stop it: shardcache stop; %s",
            outcome["cache_dir"],
            outcome["capacity_bytes"] / 1e9,
            _SHARED,
        )
    return Path(outcome["socket"])


class Deadline:
    """End of one wait, shared by all that is done for it: reconnects, greetings and requests.

    Attributes:
        limit_s: how long the wait may last.
        at_s: when it ends, of `time.monotonic`.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.at_s = time.monotonic() + limit_s

    @property
    def is_over(self) -> bool:
        """True once the wait has lasted too long."""
        return time.monotonic() >= self.at_s

    def restart(self) -> None:
        """Let the limit count from now: the wait makes progress."""
        self.at_s = time.monotonic() + self.limit_s


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits for waiting: for one shard, for a lost daemon, and until a wait is logged."""

    limit_s: float = 300.0  # how long to wait for one shard while nothing of it arrives, or for a lost daemon
    first_report_s: float = 10.0  # how long a wait lasts before it is first logged
    next_report_s: float = 60.0  # interval between further log lines
    away_s: float = math.inf  # how long to wait for a daemon that went away, if shorter than `limit_s`
    grace_s: float = 10.0  # how long to wait for a node's daemon that a private one can replace; a restart takes 2 s
    retry_s: float = 10.0  # delay before the node's daemon is first tried again after that

    def wait(
        self,
        url: str,
        deadline: Deadline,
        poll: Callable[[float], T | None],
        explain: Callable[[float], tuple[str, int]],
        on_wait: Callable[[], None] | None,
    ) -> T:
        """Wait until `poll` returns the shard, and log the reason of a long wait.

        `poll` and `explain` are given the time until which they may wait. `explain` returns the
        reason, and how many bytes have arrived; `on_wait` is called periodically. Raises
        ShardTimeoutError at the deadline, which restarts whenever the bytes have become more.
        """
        start_s = time.monotonic()
        report_s = start_s + self.first_report_s
        most_bytes = 0
        while True:
            arrived = poll(min(report_s, deadline.at_s, time.monotonic() + _LOOK_UP_S))
            if arrived is not None:
                return arrived

            check_parent()
            if on_wait is not None:
                on_wait()
            if time.monotonic() < min(report_s, deadline.at_s):
                continue

            # Also at the deadline: it restarts if bytes have arrived since the last report.
            reason, done_bytes = explain(max(deadline.at_s, time.monotonic() + _LAST_REASON_S))
            if done_bytes > most_bytes:
                most_bytes = done_bytes
                deadline.restart()
            if deadline.is_over:
                raise _timeout(url, deadline.limit_s, most_bytes, reason)
            log.warning("waiting for %s for %.0f s: %s", url, time.monotonic() - start_s, reason)
            report_s = time.monotonic() + self.next_report_s


def _timeout(url: str, limit_s: float, done_bytes: int, reason: str) -> errors.ShardTimeoutError:
    what = "no more of it arrived" if done_bytes else "did not arrive"
    return errors.ShardTimeoutError(
        f"{what} within {limit_s:g} s: {reason}",
        url=url,
        remedy="fix that cause (`shardcache status` shows the transfers), or raise timeout_s",
    )


class Outage:
    """The time from the loss of one daemon to the first answer of the next.

    Pauses are drawn between 0 and a bound that doubles with each try (full jitter: Brooker, "Exponential Backoff and
    Jitter", AWS Architecture Blog, 2015). All readers of a node lose their daemon at the same moment; this spreads out
    their reconnects, yet keeps them fast.
    """

    def __init__(self, cause: errors.NoDaemonError, begun_s: float) -> None:
        self.begun_s = begun_s
        self._cause = cause  # what ended the last connection, or prevented the first
        self._quiet = isinstance(cause, errors.StoppingError)
        self._logged = False
        self._max_s = _FIRST_PAUSE_S

    def pause(self, deadline_s: float) -> bool:
        """Wait until the next try is due, at the latest at the deadline; return False if the deadline has passed."""
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return False
        if self._quiet and now_s - self.begun_s > _QUIET_S:
            self._quiet = self._logged = False
        if not self._logged:
            level = logging.INFO if self._quiet else logging.WARNING
            text = "%s (%s); retrying for up to %.0f s"
            log.log(level, text, self._cause.message, self._cause.url, deadline_s - now_s)
            self._logged = True
        time.sleep(min(self.draw_s(), deadline_s - now_s))
        return True

    def given_up(self, last: errors.NoDaemonError) -> errors.NoDaemonError:
        """Return the error of the last try, with how long the outage has lasted."""
        lasted_s = round(time.monotonic() - self.begun_s, 1)
        message = f"{last.message}; gave up after {lasted_s:g} s"
        return type(last)(message, url=last.url, remedy=last.remedy)

    def draw_s(self) -> float:
        """Draw the pause before the next try."""
        max_s, self._max_s = self._max_s, min(2 * self._max_s, _LONGEST_PAUSE_S)
        return _random.uniform(0, max_s)


def check_parent() -> None:
    """Raise DaemonError in a worker whose training process has ended, as it would wait for minutes in vain."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise errors.DaemonError("the training process that this worker reads for has ended")
