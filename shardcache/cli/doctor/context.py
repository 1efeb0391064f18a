"""Findings, and what all checks share: the options that a daemon here would have, and the daemon that answers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from shardcache.cli.admin_client import AdminClient
from shardcache.config import Settings
from shardcache.errors import ConfigError, ShardcacheError
from shardcache.private import tool_socket
from shardcache.protocol import CONFIG_ENV, DEFAULT_CONFIG
from shardcache.redact import printable, redact
from shardcache.unix_socket import connected, credentials

_ANSWER_LIMIT_S = 10.0
STORE_VARIABLES = re.compile(r"SHARDCACHE_|AWS_|GOOGLE_|AZURE_|HF_|(?:https?|all|no)_proxy$", re.IGNORECASE)
"""Variables that select object stores, credentials and proxies."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        state: `ok`, `warning`, `failed` or `skipped`; only `failed` makes the command fail.
        check: stable name, `family.check`; empty until `named`.
        found: the observation, a phrase without a full stop.
        cause: the reason, or the consequence.
        remedy: the command, or else advice, that fixes it.
        subject: the url concerned; empty for the node.
        figures: measurements, with the unit in each name.
    """

    check: str
    state: str
    found: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return every field by name."""
        return asdict(self)

    def named(self, check: str, subject: str = "") -> Self:
        """Return the finding with the names of its check and its url; those that it already has stay."""
        return replace(self, check=self.check or check, subject=self.subject or printable(redact(subject)))


def ok(found: str, **figures: float) -> Finding:
    """Return a finding that nothing is wrong."""
    return _finding("ok", found, "", "", figures)


def skipped(why: str) -> Finding:
    """Return a finding that the check was skipped, with the reason."""
    return _finding("skipped", why, "", "", {})


def warning(found: str, cause: str, remedy: str, **figures: float) -> Finding:
    """Return a finding of something that works, but poorly or not for long."""
    return _finding("warning", found, cause, remedy, figures)


def failed(found: str, cause: str, remedy: str, **figures: float) -> Finding:
    """Return a finding of something that keeps shards from being fetched, kept or read."""
    return _finding("failed", found, cause, remedy, figures)


def of_error(error: ShardcacheError, cause: str = "") -> Finding:
    """Return the finding of a failure for an error."""
    return failed(error.message, cause, error.remedy)


def _finding(state: str, found: str, cause: str, remedy: str, figures: Mapping[str, float]) -> Finding:
    found, cause, remedy = (printable(redact(text)) for text in (found, cause, remedy))
    return Finding("", state, found, cause, remedy, figures=figures)


@dataclass(frozen=True)
class Context:
    """The context that all checks share.

    Attributes:
        flags: options given on the command line.
        config: the config file that is, or would be, read.
        settings: options from flags, environment and file, or the reason that there are none.
        socket: path at which the daemon is expected.
        status: status page of the daemon there, or the reason that none answers.
        uid: id of the user that the daemon runs as; None if unknown.
        pid: the daemon's process id; None if it is not visible from this PID namespace.
        urls: urls to probe.
        quick: True to skip measurements.
    """

    flags: Mapping[str, Any]
    config: Path
    settings: Settings | None
    config_error: ConfigError | None
    socket: Path
    status: Mapping[str, Any] | None
    daemon_error: ShardcacheError | None
    uid: int | None
    pid: int | None
    urls: tuple[str, ...]
    quick: bool

    @property
    def is_operator(self) -> bool:
        """True if the current user runs the daemon, or would; others only read from its cache."""
        return self.status is None or os.geteuid() in (0, self.uid)

    @property
    def cache_dir(self) -> Path | None:
        """The daemon's cache folder; without a daemon, the one it would use."""
        if self.status is not None:
            return Path(self.status["cache"]["dir"])
        return None if self.settings is None else self.settings.cache_dir

    @property
    def own_cache_dir(self) -> Path | None:
        """The cache folder, if the current user is its operator."""
        return self.cache_dir if self.is_operator else None

    @cached_property
    def environment(self) -> Mapping[str, str] | None:
        """The daemon's environment; None if it may not be read: it is for the daemon's user and root alone."""
        if self.pid is None:
            return None
        try:
            entries = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            return None
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def gather(flags: Mapping[str, Any], config: Path | None, urls: Sequence[str] = (), *, quick: bool = False) -> Context:
    """Read the options and query the daemon. Raises DaemonError as `socket_path` does."""
    settings, config_error, status, daemon_error = None, None, None, None
    try:
        settings = Settings.load(flags, config)
    except ConfigError as exn:
        config_error = exn
    socket = tool_socket(flags.get("socket") if settings is None else settings.socket)
    try:
        status = AdminClient(socket, _ANSWER_LIMIT_S).status()
    except ShardcacheError as exn:
        daemon_error = exn
    uid, pid = (None, None) if status is None else _process(status["pid"], socket)
    file = config or Path(os.environ.get(CONFIG_ENV) or DEFAULT_CONFIG)
    return Context(flags, file, settings, config_error, socket, status, daemon_error, uid, pid, tuple(urls), quick)


def _process(pid: int, socket: Path) -> tuple[int | None, int | None]:
    """Return the daemon's uid and pid; in another PID namespace, its pid may belong to another process here."""
    listener_pid, listener_uid = None, None
    with suppress(OSError):  # the daemon has stopped since
        listener_pid, listener_uid = connect(socket)
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        if pid == listener_pid or b"shardcache" in (process / "cmdline").read_bytes():
            return process.stat().st_uid, pid
    return listener_uid, None


def connect(socket: Path) -> tuple[int, int]:
    """Connect to a socket; return the pid and uid of the process that bound it: the daemon or its service manager."""
    with connected(socket, _ANSWER_LIMIT_S) as probe:
        pid, uid, _gid = credentials(probe)
    return pid, uid
