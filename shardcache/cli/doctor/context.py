"""Findings and the `Context`, which all checks of `shardcache doctor` share.

A finding is one line of the doctor's report. The context has the options that the doctor was given,
and the status of the daemon at the socket, if there is one. The operator is the user who runs the
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
from shardcache.shared.credentials.store_variables import reaches_stores
from shardcache.shared.exceptions import ConfigError, ShardcacheError
from shardcache.shared.private import tool_socket
from shardcache.shared.units import user_name
from shardcache.shared.unix_socket import connected, peer_ids
from shardcache.shared.wording.redact import printable, redact

_ANSWER_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: name of the check, `family.check`, which does not change between releases; empty
            until `named` is called.
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
        """The first word of the check's name, or "store" for a finding about a url.

        It is the finding's heading in the report.
        """
        if self.subject:
            return "store"
        family, _, _ = self.check.partition(".")
        return family

    def named(self, check: str) -> Self:
        """Return the finding with the name of a check, or unchanged if it already has a name."""
        return replace(self, check=self.check or check)

    def about(self, url: str) -> Self:
        """Return the finding with a url as its subject."""
        return replace(self, subject=printable(redact(url)))


def _make_finding(
    state: str,
    found: str,
    cause: str = "",
    remedy: str = "",
    **figures: float,
) -> Finding:
    """Return a finding without a name. Secrets and control characters are removed from its texts.

    Args:
        state: as `Finding.state`.
        found: the observation.
        cause: the reason or the consequence.
        remedy: the command or advice that fixes the problem.
        figures: measurements, with the unit in each name.
    """
    return Finding(
        check="",
        state=state,
        found=printable(redact(found)),
        cause=printable(redact(cause)),
        remedy=printable(redact(remedy)),
        figures=figures,
    )


# Functions that return a finding in a state.
ok = partial(_make_finding, "ok")
skipped = partial(_make_finding, "skipped")
warning = partial(_make_finding, "warning")  # the node works, but poorly or not for long
failed = partial(_make_finding, "failed")  # shards cannot be fetched, cached or read


def measured(found: str, figures: Mapping[str, float]) -> Finding:
    """Return the `ok` finding of measurements that show no problem."""
    return replace(ok(found), figures=figures)


def error_finding(error: ShardcacheError, cause: str = "", remedy: str | None = None) -> Finding:
    """Return the `failed` finding for an error.

    Args:
        error: the error.
        cause: the reason or the consequence.
        remedy: remedy of the finding; None for the error's own.
    """
    if remedy is None:
        remedy = error.remedy
    return failed(error.message, cause, remedy)


class Context:
    """The options, and the daemon's status: the facts that all checks share.

    Attributes:
        flags: options of `serve` from the command line, by name.
        urls: urls to probe; empty to probe one url of each store.
        quick: True to leave out measurements, which take long.
        config: path of the config file, which need not exist.
        settings: settings from flags, environment and config file; None if they are invalid.
        config_error: reason why the settings are invalid; None if they are valid.
        socket: path at which to look for a daemon.
        status: status of the daemon at `socket`, as JSON; None if no daemon answers.
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
            named_socket = self.settings.socket
        except ConfigError as exn:
            self.config_error = exn
            named_socket = flags.get("socket")
        self.socket = tool_socket(named_socket)
        try:
            self.status = AdminClient(self.socket).status()
        except ShardcacheError as exn:
            self.daemon_error = exn
        else:
            self._find_process(self.status["pid"])

    def _find_process(self, pid: int) -> None:
        """Set `uid` and `pid` to the user and the process id of the daemon, if they can be found.

        Args:
            pid: the daemon's process id in its status. If the daemon runs in another PID namespace,
                another process may have this id here.
        """
        listener_pid = None
        with suppress(OSError):  # the daemon has stopped since
            listener_pid, self.uid = listener_of(self.socket)
        process = Path(f"/proc/{pid}")
        with suppress(OSError):  # no process has this id here
            # The process is the daemon's if it listens at the socket. A service manager may have
            # opened the socket instead; the process is then recognised by its command line.
            if pid == listener_pid or b"shardcache" in (process / "cmdline").read_bytes():
                self.uid = process.stat().st_uid
                self.pid = pid

    @property
    def is_operator(self) -> bool:
        """True if the current user runs the daemon, would run it, or is root."""
        return self.status is None or os.geteuid() in (0, self.uid)

    @property
    def cache_dir(self) -> Path | None:
        """The daemon's cache folder; if no daemon answers, the folder that it would use."""
        if self.status is not None:
            return Path(self.status["cache"]["dir"])
        if self.settings is not None:
            return self.settings.cache_dir
        return None

    @property
    def own_cache_dir(self) -> Path | None:
        """The cache folder if the current user is the operator; otherwise None."""
        return self.cache_dir if self.is_operator else None

    @cached_property
    def environment(self) -> Mapping[str, str] | None:
        """The daemon's environment, as far as it concerns stores (see `store_variables`).

        None if it cannot be read: only the daemon's user and root may read it.
        """
        if self.pid is None:
            return None
        try:
            environ = Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return None
        entries = environ.decode(errors="replace").split("\0")
        variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        return store_variables(variables)


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
    options = {**context.flags, **proposed}
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        values = value if isinstance(value, tuple) else (value,)  # a tuple for a repeated flag
        for each in values:
            words += [flag, str(each)]
    return shlex.join(words)


def listener_of(socket: Path) -> tuple[int, int]:
    """Connect to a socket; return the process id and the user id of its listener.

    The listener is the daemon, or a service manager that has opened the socket for the daemon.
    """
    with connected(socket, _ANSWER_LIMIT_S) as probe:
        pid, uid, _gid = peer_ids(probe)
    return pid, uid


def this_user() -> str:
    """Return the current user's name."""
    return user_name(os.geteuid())
