"""Findings, and what all checks share: options, the daemon that answers, and facts about paths."""

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
from shardcache.shared.unix_socket import connected, credentials

_ANSWER_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: stable name, `family.check`; empty until `named`.
        state: `ok`, `warning`, `failed` or `skipped`; only `failed` makes the command fail.
        found: the observation, a phrase without a full stop.
        cause: the reason, or the consequence.
        remedy: the command, or else advice, that fixes it.
        subject: the url concerned; empty for the node.
        figures: measurements, with the unit in each name.
        code: of the error that was found, see `ShardcacheError`; empty if it was none.
        proposes: better values of options.
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
        """Return the finding with the name of its check, unless it has one."""
        return replace(self, check=self.check or check)

    def about(self, url: str) -> Self:
        """Return the finding with a url as its subject."""
        return replace(self, subject=printable(redact(url)))


def finding(state: str, found: str, cause: str = "", remedy: str = "", **figures: float) -> Finding:
    """Return a finding without a name, whose texts are redacted and printable."""
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
warning = partial(finding, "warning")  # it works, but poorly or not for long
failed = partial(finding, "failed")  # it keeps shards from being fetched, kept or read


def measured(found: str, figures: Mapping[str, float]) -> Finding:
    """Return the finding of measurements that show no problem."""
    return replace(ok(found), figures=figures)


def finding_of(error: ShardcacheError, cause: str = "", remedy: str | None = None) -> Finding:
    """Return a failure for an error; without `remedy`, the remedy is the error's."""
    return failed(error.message, cause, error.remedy if remedy is None else remedy)


class Context:
    """Facts that all checks share: the options, and the daemon's answers.

    Attributes:
        flags: options from the command line.
        urls: to probe; empty to probe one of each store.
        quick: True to leave out what takes long.
        config: the file that is, or would be, read.
        settings: from flags, environment and file; None if they are invalid.
        config_error: the reason why they are invalid.
        socket: path at which to look for a daemon.
        status: page of the daemon at `socket`; None if none answers.
        daemon_error: the reason why none answers.
        uid: id of the user that the daemon runs as; None if unknown.
        pid: of the daemon; None if it is not visible from this PID namespace.
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
        """Set `uid` and `pid` to those of the daemon's process.

        Args:
            pid: the daemon's, in its status. If it runs in another PID namespace, another process
                may have this pid here.
        """
        listener_pid = None
        with suppress(OSError):  # the daemon has stopped since
            listener_pid, self.uid = listener_of(self.socket)
        process = Path(f"/proc/{pid}")
        with suppress(OSError):
            if pid == listener_pid or b"shardcache" in (process / "cmdline").read_bytes():
                self.uid = process.stat().st_uid
                self.pid = pid

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
        """The daemon's `store_variables`; None if this user may not read them.

        Only the daemon's user and root may.
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
        context: has these options.
        proposed: better values of options, by name.
    """
    words = ["shardcache", "serve"]
    for flag, value in {**context.flags, **proposed}.items():
        values = value if isinstance(value, tuple) else (value,)
        for word in values:
            words += ["--" + flag.replace("_", "-"), str(word)]
    return shlex.join(words)


def listener_of(socket: Path) -> tuple[int, int]:
    """Connect to a socket; return pid and uid of its listener: the daemon or a service manager."""
    with connected(socket, _ANSWER_LIMIT_S) as probe:
        pid, uid, _gid = credentials(probe)
    return pid, uid


def this_user() -> str:
    """Return the current user's name."""
    return user_name(os.geteuid())
