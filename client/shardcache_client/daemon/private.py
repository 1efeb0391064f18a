"""The choice of a daemon: the node's, or a private one of this user, which is started when it is needed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

from shardcache.errors import ConfigError, DaemonError, from_json
from shardcache.private import PrivatePlace, is_listening, locked, node_has_daemon
from shardcache.protocol import socket_path

log = logging.getLogger("shardcache")

Which: TypeAlias = Literal["auto", "node", "private"]
Fallback: TypeAlias = Literal["error", "private"]

# On a node under load, the packages of a daemon take seconds to import.
_START_S = 120.0
_NEEDED = ("aiohttp", "click", "diskcache", "fsspec", "pydantic_settings", "structlog")
_SHARED = "for one that users share: shardcache serve --cache-dir /path/on/local/disk --capacity 500GB"


@dataclass(frozen=True, slots=True)
class DaemonChoice:
    """The daemon that serves a reader.

    Attributes:
        node: socket of the node's daemon; None for this user's private one.
        fallback: True if the private one serves while the node's cannot.
    """

    node: Path | None
    fallback: bool = False

    @classmethod
    def of(
        cls, socket: str | os.PathLike[str] | None = None, daemon: Which = "auto", fallback: Fallback = "error"
    ) -> DaemonChoice:
        """Return the choice that a user's arguments describe.

        Raises ConfigError if they contradict each other, or name a private daemon where its packages are not installed.
        """
        if socket is not None and daemon == "private":
            raise ConfigError("a socket is not that of a private daemon", remedy='omit socket, or daemon="private"')
        is_private = daemon == "private" or (daemon == "auto" and socket is None and not node_has_daemon())
        if is_private or fallback == "private":
            _check_installed()
        return cls(None) if is_private else cls(socket_path(socket), fallback == "private")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that describe this choice."""
        if self.node is None:
            return {"daemon": "private"}
        return {"socket": self.node, "fallback": "private" if self.fallback else "error"}


def _check_installed() -> None:
    missing = next((name for name in _NEEDED if find_spec(name) is None), None)
    if missing is not None:
        raise ConfigError(
            f"no daemon is set up on this node, and this environment cannot start one: {missing} is not installed",
            remedy="pip install 'shardcache[daemon]'; or start the node's daemon, and set SHARDCACHE_SOCKET",
        )


def ensure_started() -> Path:
    """Return the socket of the private daemon with this process's credentials; start it unless it runs.

    Of many processes that need it at once, one starts it, and the others wait. Raises DaemonError if its folder could
    be another user's, and the errors of `shardcache serve`.
    """
    place = PrivatePlace.find()
    if not is_listening(place.socket):
        with locked(place.folder, _START_S):
            if not is_listening(place.socket):
                _start()
    return place.socket


def _start() -> None:
    command = [sys.executable, "-P", "-m", "shardcache", "serve", "--private", "--json"]
    try:
        # A session of its own: no signal to this job's processes reaches it, even while it starts.
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True, timeout=_START_S
        )
        outcome = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        raise DaemonError(f"the private daemon did not start within {_START_S:g} s") from None
    except ValueError:
        raise DaemonError(
            f"the private daemon did not start: {ran.stderr.strip()[-1000:]}", remedy="shardcache serve --private"
        ) from None
    if "error" in outcome:
        raise from_json(outcome["error"])
    if outcome["started"]:
        log.warning(
            "started a private shardcache daemon: cache in %s, up to %.3g GB; to stop it: shardcache stop; %s",
            outcome["cache_dir"],
            outcome["capacity_bytes"] / 1e9,
            _SHARED,
        )
