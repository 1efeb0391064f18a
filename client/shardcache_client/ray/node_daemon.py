"""The daemon of one Ray node: a child process of an actor on that node, restarted whenever it ends."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray

from shardcache.errors import DaemonError
from shardcache.protocol import socket_path
from shardcache.unix_socket import health

log = logging.getLogger("shardcache")

NAMESPACE = "shardcache"
"""Ray namespace of the actors, so that every job of the cluster finds them."""

_HEALTH_TIMEOUT_S = 5.0
_POLL_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `shardcache serve`, the same for all nodes; `{node}` in a path stands for the Ray node's id."""

    cache_dir: str
    capacity: str
    socket: str | None
    flags: tuple[str, ...]
    env: dict[str, str]

    def socket_of(self, node: str) -> Path:
        """Return the path of a node's socket."""
        return socket_path(self.socket and self.socket.replace("{node}", node))

    def arguments(self, node: str) -> list[str]:
        """Return the arguments of a node's daemon."""
        cache_dir = self.cache_dir.replace("{node}", node)
        paths = ("--socket", str(self.socket_of(node)), "--cache-dir", cache_dir)
        return ["serve", *paths, "--capacity", self.capacity, *self.flags]


def actor_name(node: str) -> str:
    """Return the name of a node's actor."""
    return f"daemon-{node}"


def node_socket() -> Path:
    """Return the socket of this node's daemon: the one that `start_daemons` started, or else the default path.

    For `ShardDataset(…, socket=node_socket())` in a Ray task or actor, where the daemons have a socket of their own.
    """
    node = ray.get_runtime_context().get_node_id()
    try:
        actor = ray.get_actor(actor_name(node), namespace=NAMESPACE)
    except ValueError:  # none was started, or not yet
        return socket_path()
    return Path(ray.get(actor.socket.remote()))


class NodeDaemon:
    """Actor that runs its node's daemon as a child process.

    A daemon that ends is restarted, after pauses that double from 0.5 s to 30 s while it ends before it is ready. The
    daemon gets SIGTERM when the actor's process ends, whatever ends it.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._node = ray.get_runtime_context().get_node_id()
        self._options = options
        self._socket = options.socket_of(self._node)
        self._stopping, self._failed = Event(), Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._status: int | None = None
        # The kernel ties the child to the thread that starts it: this one lives as long as the process.
        self._thread = Thread(target=self._supervise, name="shardcache-daemon", daemon=True)
        self._thread.start()

    def socket(self) -> str:
        """Return the path of the daemon's socket."""
        return str(self._socket)

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """Return the daemon's socket, pid and health, as soon as it answers.

        Raises DaemonError if it ends before that, or does not answer within the timeout.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._failed.wait(_POLL_S):
                raise DaemonError(
                    f"the daemon on Ray node {self._node} ended with status {self._status} before it was ready",
                    url=str(self._socket),
                    remedy="see its output: Ray prints it as that of the NodeDaemon, and keeps it in the node's logs",
                )
            found = self.health()
            if found is not None and self._process is not None:
                return {"socket": self.socket(), "pid": self._process.pid, **found}
        raise DaemonError(
            f"the daemon on Ray node {self._node} does not answer after {timeout_s:g} s", url=str(self._socket)
        )

    def health(self) -> dict[str, Any] | None:
        """Return the daemon's report on its health; None if it does not answer."""
        try:
            return health(self._socket, _HEALTH_TIMEOUT_S)
        except (OSError, ValueError):
            return None

    def stop(self) -> None:
        """Stop the daemon and return when it has exited; it is killed if it does not drain within 30 s."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._thread.join()

    def _supervise(self) -> None:
        command = [sys.executable, "-m", "shardcache_client.ray.tether", str(os.getpid())]
        command += self._options.arguments(self._node)
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **self._options.env})
            if self._stopping.is_set():  # `stop` did not see this process
                self._process.terminate()
            served = self._wait()
            if self._stopping.is_set():
                return
            log.warning("shardcache daemon on Ray node %s ended with status %s; restarting", self._node, self._status)
            pause_s = _FIRST_PAUSE_S if served else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._stopping.wait(pause_s)

    def _wait(self) -> bool:
        """Wait until the daemon has ended; return True if it served before that."""
        assert self._process is not None
        served = False
        while (status := self._process.poll()) is None:
            if not served and self.health() is not None:
                served = True
                self._failed.clear()
            if served:
                self._process.wait()
            else:
                self._stopping.wait(_POLL_S)
        self._status = status
        if not served:
            self._failed.set()
        return served
