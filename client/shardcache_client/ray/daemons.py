"""Daemons for all nodes of a Ray cluster, those that join later included."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from threading import Event, Lock, Thread
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shardcache.errors import ConfigError, DaemonError
from shardcache_client.ray.node_daemon import NAMESPACE, NodeDaemon, ServeOptions, actor_name

_SUPERVISOR = "daemons"
_HEAD = {"node:__internal_head__": 0.001}
_POLL_S = 2.0  # Ray announces new nodes to nobody
_READY_TIMEOUT_S = 120.0

_HELD: list[Any] = []  # Ray ends an actor that no process has a handle of; these are to live as long as the job

Report = dict[str, dict[str, Any]]


class Daemons:
    """The daemons of a cluster, as `start_daemons` returns them."""

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor

    def __repr__(self) -> str:
        return f"Daemons({self._supervisor!r})"

    def ready(self, timeout_s: float = _READY_TIMEOUT_S) -> Report:
        """Return socket, pid and health of each node's daemon by the node's id, as soon as all alive nodes have one.

        Raises DaemonError if a daemon ends before it is ready, or does not answer within the timeout.
        """
        report: Report = ray.get(self._supervisor.ready.remote(timeout_s))
        return report

    def stop(self) -> None:
        """Stop all daemons, and return when they have exited. Cached shards stay on disk."""
        ray.get(self._supervisor.stop.remote())
        ray.kill(self._supervisor)


def start_daemons(
    *,
    cache_dir: str | os.PathLike[str],
    capacity: str,
    socket: str | os.PathLike[str] | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    lifetime: Literal["job", "cluster"] = "job",
    timeout_s: float = _READY_TIMEOUT_S,
) -> Daemons:
    """Start a shardcache daemon on every node of the Ray cluster, and on each node that joins; wait until all serve.

    Every node needs `shardcache[daemon]`. A daemon that ends is restarted; one whose node is removed ends with it. If
    the cluster has daemons already, these are returned, whatever the arguments: they still end with the job that
    started them, or with the cluster.

    Args:
        cache_dir: folder on each node's local disk; kept when the daemons stop. Here and in `socket`, `{node}` stands
            for the Ray node's id: for clusters with several nodes on one machine.
        capacity: of each node's cache, such as "500GB".
        socket: path of each node's socket. Default: the same as for `shardcache serve`, where ShardDataset looks.
        flags: further options of `shardcache serve`, such as `("--max-bandwidth", "1GB")`.
        env: variables for the daemons, such as credentials, on top of those that Ray was started with.
        lifetime: "job": the daemons stop when the job that started them ends, however it ends. "cluster": they run
            until `stop()`, or until the cluster stops.
        timeout_s: how long to wait until all daemons are ready.

    Raises:
        ConfigError: `lifetime` is neither of the two.
        DaemonError: a daemon ended before it was ready, or was not ready in time. All are stopped again.
    """
    if lifetime not in ("job", "cluster"):
        raise ConfigError(f"lifetime is {lifetime!r}", remedy='choose "job" or "cluster"')
    where = None if socket is None else os.fspath(socket)
    options = ServeOptions(os.fspath(cache_dir), capacity, where, tuple(flags), dict(env or {}))
    supervisor = (
        ray.remote(Supervisor)
        .options(
            name=_SUPERVISOR,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached" if lifetime == "cluster" else None,
            num_cpus=0,
            resources=_HEAD,  # the cluster ends with its head, and with no other node
            max_restarts=-1,
            max_concurrency=8,
        )
        .remote(options)
    )
    _HELD.append(supervisor)
    daemons = Daemons(supervisor)
    try:
        daemons.ready(timeout_s)
    except DaemonError:
        daemons.stop()
        raise
    return daemons


class Supervisor:
    """Actor that keeps a `NodeDaemon` on each alive node. Owns these actors, so they end with it."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._actors: dict[str, Any] = {}
        self._lock = Lock()
        self._stopping = Event()
        self._place()
        Thread(target=self._watch, name="shardcache-nodes", daemon=True).start()

    def ready(self, timeout_s: float) -> Report:
        """Return the report of each alive node's daemon by the node's id, once all serve. Raises DaemonError."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._reports(timeout_s)
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as exn:
                # The actor's node is leaving the cluster, or Ray restarts the actor.
                if time.monotonic() > deadline_s:
                    raise DaemonError(f"a node's daemon cannot be started: {exn}") from exn
                self._stopping.wait(_POLL_S)

    def _reports(self, timeout_s: float) -> Report:
        self._place()
        with self._lock:
            asked = {node: actor.ready.remote(timeout_s) for node, actor in self._actors.items()}
        return dict(zip(asked, ray.get(list(asked.values())), strict=True))

    def stop(self) -> None:
        """Stop all daemons, and return when they have exited."""
        self._stopping.set()
        with self._lock:
            actors, self._actors = list(self._actors.values()), {}
        stopped = [actor.stop.remote() for actor in actors]
        for each in stopped:
            try:
                ray.get(each)
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):
                continue  # it ended with its node
        for actor in actors:
            ray.kill(actor)

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_S):
            self._place()

    def _place(self) -> None:
        """Start an actor on each alive node without one, and forget those of dead nodes."""
        with self._lock:
            if self._stopping.is_set():
                return
            alive = _alive_nodes()
            self._actors = {node: actor for node, actor in self._actors.items() if node in alive}
            for node in alive - self._actors.keys():
                self._actors[node] = (
                    ray.remote(NodeDaemon)
                    .options(
                        name=actor_name(node),
                        namespace=NAMESPACE,
                        num_cpus=0,
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                        max_restarts=-1,
                        max_concurrency=8,
                    )
                    .remote(self._options)
                )


def _alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
