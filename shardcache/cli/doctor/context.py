"""Findings and the `Context`, which all checks of `shardcache doctor` share.

A finding is one line of the doctor's report. The context has the options that the doctor was given,
and the answers of the daemon at the socket, if there is one. The operator is the user who runs the
daemon, or would run it; other users only read from its cache.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from shardcache.cli.admin_client import AdminClient
from shardcache.config.settings import Settings, config_file
from shardcache.errors import ConfigError, ShardcacheError
from shardcache.redact import printable, redact
from shardcache.shared.credentials.store_variables import reaches_stores
from shardcache.shared.private import tool_socket
from shardcache.shared.units import user_name
from shardcache.shared.unix_socket import connected, peer_ids

_ANSWER_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: stable name of the check, `family.check`; empty until `named` is called.
        state: `ok`, `warning`, `failed` or `skipped`; only `failed` makes the command fail.
        found: the observation, a phrase without a full stop.
        cause: the reason for the observation, or its consequence; may be empty.
        remedy: a command, or else advice, that fixes the problem; empty if there is none.
        subject: the url concerned; empty for a finding about the node.
        figures: measurements, with the unit in each name.
        code: code of the error that was found (`ShardcacheError.code`); empty if the finding is not
            about an error.
        proposes: better values of options, by name.
    """

    check: str
    state: str
    found: str
    cause: str = ""
    remedy: str = ""
    subject: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    code: str = ""
    proposes: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Heading of the finding in the report."""
        return "store" if self.subject else self.check.partition(".")[0]

    def named(self, check: str) -> Self:
        """Return the finding with the name of a check; a finding that has a name keeps it."""
        return replace(self, check=self.check or check)

    def about(self, url: str) -> Self:
        """Return the finding with a url as its subject."""
        return replace(self, subject=printable(redact(url)))


def finding(state: str, found: str, cause: str = "", remedy: str = "", **figures: float) -> Finding:
    """Return a finding without a name; secrets and control characters are removed from its texts.

    Args:
        state: as `Finding.state`.
        found: the observation.
        cause: the reason or the consequence.
        remedy: the command or advice that fixes the problem.
        figures: measurements.
    """
    return Finding(
        check="",
        state=state,
        found=printable(redact(found)),
        cause=printable(redact(cause)),
        remedy=printable(redact(remedy)),
        figures=figures,
    )


ok = partial(finding, "ok")
skipped = partial(finding, "skipped")
warning = partial(finding, "warning")  # the node works, but poorly or not for long
failed = partial(finding, "failed")  # the problem keeps shards from being fetched, cached or read


def measured(found: str, figures: Mapping[str, float]) -> Finding:
    """Return the finding of measurements that show no problem."""
    return replace(ok(found), figures=figures)


def finding_of(error: ShardcacheError, cause: str = "", remedy: str | None = None) -> Finding:
    """Return the failed finding for an error.

    Args:
        error: the error.
        cause: the reason or the consequence.
        remedy: remedy of the finding; None for the error's own.
    """
    return failed(error.message, cause, error.remedy if remedy is None else remedy)


class Context:
    """Facts that all checks share: the options, and the daemon's answers.

    Attributes:
        flags: options from the command line.
        urls: urls to probe; empty to probe one url of each store.
        quick: True to leave out measurements, which take long.
        config: path of the config file, which need not exist.
        settings: settings from flags, environment and config file; None if they are invalid.
        config_error: reason why the settings are invalid; None if they are valid.
        socket: path at which to look for a daemon.
        status: status page of the daemon at `socket`; None if no daemon answers.
        daemon_error: reason why no daemon answers; None if one answers.
        uid: id of the user that the daemon runs as; None if unknown.
        pid: process id of the daemon; None if the process is not visible from this PID namespace.
    """

    def __init__(
        self,
        flags: Mapping[str, Any],
        config: Path | None,
        urls: Sequence[str] = (),
        *,
        quick: bool = False,
    ) -> None:
        """Read the options and query the daemon. Raises DaemonError as `tool_socket` does."""
        self.flags = flags
        self.urls = urls
        self.quick = quick
        self.config = config_file(config)
        self.settings: Settings | None = None
        self.config_error: ConfigError | None = None
        self.status: Mapping[str, Any] | None = None
        self.daemon_error: ShardcacheError | None = None
        self.uid: int | None = None
        self.pid: int | None = None
        try:
            self.settings = Settings.load(flags, config)
        except ConfigError as exn:
            self.config_error = exn
        named_socket = flags.get("socket")
        if self.settings is not None:
            named_socket = self.settings.socket
        self.socket = tool_socket(named_socket)
        try:
            self.status = AdminClient(self.socket).status()
        except ShardcacheError as exn:
            self.daemon_error = exn
        else:
            self._find_process(self.status["pid"])

    def _find_process(self, pid: int) -> None:
        """Set `uid` and `pid` to the user and the process id of the daemon.

        Args:
            pid: the daemon's process id in its status. If the daemon runs in another PID namespace,
                another process may have this id here.
        """
        listener_pid = None
        with suppress(OSError):  # the daemon has stopped since
            listener_pid, self.uid = listener_of(self.socket)
        process = Path(f"/proc/{pid}")
        with suppress(OSError):
            # The process is the daemon's if it listens at the socket. A service manager may have
            # opened the socket instead; the process is then recognised by its command line.
            if pid == listener_pid or b"shardcache" in (process / "cmdline").read_bytes():
                self.uid = process.stat().st_uid
                self.pid = pid

    @property
    def is_operator(self) -> bool:
        """True if the current user runs the daemon, or would run it."""
        return self.status is None or os.geteuid() in (0, self.uid)

    @property
    def cache_dir(self) -> Path | None:
        """The daemon's cache folder; if no daemon answers, the folder that it would use."""
        if self.status is not None:
            return Path(self.status["cache"]["dir"])
        return None if self.settings is None else self.settings.cache_dir

    @property
    def own_cache_dir(self) -> Path | None:
        """The cache folder if the current user is its operator; otherwise None."""
        return self.cache_dir if self.is_operator else None

    @cached_property
    def environment(self) -> Mapping[str, str] | None:
        """The daemon's `store_variables`; None if this user may not read them.

        Only the daemon's user and root may read them.
        """
        if self.pid is None:
            return None
        try:
            data = Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return None
        entries = data.decode(errors="replace").split("\0")
        variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        return self.store_variables(variables)

    @staticmethod
    def store_variables(environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that select object stores, credentials, proxies and certificates."""
        return {name: value for name, value in environment.items() if reaches_stores(name)}


def start_command(context: Context, proposed: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the command that starts a daemon with the options that the doctor was given.

    Args:
        context: has the options that the doctor was given.
        proposed: better values of options, by name.
    """
    words = ["shardcache", "serve"]
    for flag, value in {**context.flags, **proposed}.items():
        values = value if isinstance(value, tuple) else (value,)
        for word in values:
            words += ["--" + flag.replace("_", "-"), str(word)]
    return shlex.join(words)


def listener_of(socket: Path) -> tuple[int, int]:
    """Connect to a socket; return process id and user id of its listener.

    The listener is the daemon, or a service manager that has opened the socket for the daemon.
    """
    with connected(socket, _ANSWER_LIMIT_S) as probe:
        pid, uid, _gid = peer_ids(probe)
    return pid, uid


def this_user() -> str:
    """Return the current user's name."""
    return user_name(os.geteuid())
