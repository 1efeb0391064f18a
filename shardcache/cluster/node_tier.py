"""One node's tier: nginx with its configuration, its folders and its figures. Linux only.

`shardcache cluster run` constructs a `NodeTier` and calls its blocking method `run`. The sources of
the configuration are the files of the list of nodes and of the certificates. When one of them
changes, the configuration is written again and nginx reloads it. The figures are counts of requests
and bytes, which nginx serves to `shardcache cluster status`.
"""

import json
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event

from shardcache.cluster import nginx_process, tier_folder
from shardcache.cluster.access_log import AccessLog, TierFigures
from shardcache.cluster.nginx_conf import render
from shardcache.cluster.tier_config import Tier, Tls
from shardcache.shared.exceptions import ConfigError, ShardcacheError

_STATUS_FILE = "status.json"
_ACCESS_LOG = "access.log"
_PID_FILE = "nginx.pid"
# Interval between checks of nginx, its log and the watched files.
_PERIOD_S = 2.0
# Interval between attempts to use sources that were invalid.
_RETRY_S = 5.0
# Interval between measurements of nginx's cache on disk, each of which lists all of its files.
_MEASURE_S = 60.0


class NodeTier:
    """nginx of one node, whose configuration is kept up to date with its sources."""

    def __init__(
        self,
        read_tier: Callable[[], Tier],
        name: str,
        sources: tuple[Path, ...],
        report: Callable[[str], object],
        report_ready: Callable[[str], object],
    ) -> None:
        """Read the configuration. Raises ConfigError.

        Args:
            read_tier: reads the sources and returns the tier. The function is called again whenever
                one of the sources has changed.
            name: name or address of this node in the tier.
            sources: the files that are watched for changes.
            report: called with each message for the operator.
            report_ready: called with a line about the tier once nginx listens, and after each
                reload.
        """
        self._read_tier = read_tier
        self._name = name
        self._sources = sources
        self._report = report
        self._report_ready = report_ready
        # The stamps are taken before the sources are read, so that a change in between is noticed.
        self._seen_stamps = self._stamps()
        self._tier = read_tier()
        self._node = self._tier.node(name)
        self._cache_dir = self._tier.cache_folder(self._node)
        self._run_dir = self._tier.run_folder(self._node)
        self._config = self._run_dir / "nginx.conf"
        self._rendered = ""  # the text of the configuration that nginx uses
        self._figures = TierFigures()
        self._next_measure_s = 0.0  # time of the next `TierFigures.measure`, by the monotonic clock
        self._started_s = time.time()
        # The reason why nginx does not use the current sources; None if it uses them.
        self._stale_reason: str | None = None
        self._last_reload_s = 0.0  # time of the last `_reload`, by the monotonic clock

    def run(self, stopping: Event) -> int:
        """Run nginx until `stopping` is set, or nginx ends.

        Return 0 after `stopping` was set, and nginx's exit status otherwise. Raises ConfigError.
        """
        nginx = nginx_process.find_program()
        self._prepare(nginx)
        nginx_process.check_config(nginx, self._config)
        nginx_process.clear_front(self._tier.front(self._node))
        log = AccessLog(self._cache_dir / _ACCESS_LOG, self._tier.owner_port)
        process = nginx_process.start(nginx, self._config)
        try:
            if nginx_process.wait_until_listening(process, self._run_dir / _PID_FILE):
                self._announce_ready()
            self._supervise(nginx, process, log, stopping)
        finally:
            status = nginx_process.end(process)
        tier_folder.finish(self._cache_dir)
        return 0 if stopping.is_set() else status

    def _prepare(self, nginx: str) -> None:
        """Make the folders, and write the configuration. Raises ConfigError."""
        try:
            user = self._tier.user or nginx_process.default_user(nginx)
            tier_folder.make_folder(self._cache_dir, 0o700, user)
            tier_folder.make_folder(self._run_dir, 0o750, user)
            if tier_folder.prepare(self._cache_dir):
                self._report("unclean shutdown: the tier's cache was cleared")
            self._rendered = render(self._tier, self._node)
            self._config.write_text(self._rendered)
        except OSError as exn:
            raise ConfigError(
                f"cannot write {exn.filename}: {exn.strerror}",
                remedy="choose another --cache-dir and --run-dir, "
                "or give this user the right to write there",
            ) from None

    def _supervise(
        self,
        nginx: str,
        process: nginx_process.Process,
        log: AccessLog,
        stopping: Event,
    ) -> None:
        """Publish figures and use changed sources until `stopping` is set, or nginx ends.

        Args:
            nginx: path of the program.
            process: the running nginx.
        """
        reported_failure: str | None = None
        while process.poll() is None:
            failure = self._update_figures(process, log)
            if failure is not None and failure != reported_failure:
                self._report(f"the tier's figures are not up to date: {failure}")
            reported_failure = failure
            if stopping.wait(_PERIOD_S):
                return
            self._reload_if_due(nginx, process)

    def _update_figures(self, process: nginx_process.Process, log: AccessLog) -> str | None:
        """Count the requests that nginx has served since the last call, and publish the figures.

        Return None, or the reason if that fails, such as a full disk. The failure is not raised, as
        nginx can still serve its node.
        """
        try:
            if time.monotonic() >= self._next_measure_s:
                self._figures.measure(self._cache_dir / tier_folder.PARTS)
                self._next_measure_s = time.monotonic() + _MEASURE_S
            log.read(self._figures)
            if log.rotate():
                process.send_signal(signal.SIGUSR1)  # nginx then reopens its logs
            self._publish()
        except OSError as exn:
            return str(exn)
        return None

    def _reload_if_due(self, nginx: str, process: nginx_process.Process) -> None:
        """Reload if the sources have changed, or, at intervals, if they could not be used."""
        since_reload_s = time.monotonic() - self._last_reload_s
        is_retry_due = self._stale_reason is not None and since_reload_s >= _RETRY_S
        stamps = self._stamps()
        if stamps != self._seen_stamps or is_retry_due:
            self._seen_stamps = stamps
            self._last_reload_s = time.monotonic()
            self._reload(nginx, process)

    def _reload(self, nginx: str, process: nginx_process.Process) -> None:
        """Have nginx use the current sources.

        If they cannot be used, the previous configuration stays in use, and `_stale_reason` says
        why.
        """
        try:
            tier = self._read_tier()
            rendered = render(tier, tier.node(self._name))
            self._config.write_text(rendered)
            nginx_process.check_config(nginx, self._config)
            nginx_process.reload(process, str(tier.front(self._node)), tier.digest)
        except (ShardcacheError, OSError) as exn:
            # The file gets the configuration back that nginx uses. A failure does no harm, as nginx
            # has read that configuration, and `_prepare` writes the file before the next start.
            with suppress(OSError):
                self._config.write_text(self._rendered)
            reason = exn.message if isinstance(exn, ShardcacheError) else str(exn)
            if reason != self._stale_reason:  # else it was reported before an earlier retry
                self._report(f"the previous configuration stays in use: {exn}")
            self._stale_reason = reason
            return
        self._tier = tier
        self._rendered = rendered
        self._stale_reason = None
        self._announce_ready()

    def _announce_ready(self) -> None:
        """Report the number of nodes and the digest of the tier."""
        count = len(self._tier.nodes)
        nodes = "1 node" if count == 1 else f"{count} nodes"
        self._report_ready(f"{nodes}, digest {self._tier.digest}")

    def _publish(self) -> None:
        """Write the figures to the file that nginx serves."""
        page = {
            "node": self._node.name,
            "started_s": self._started_s,
            "free_bytes": shutil.disk_usage(self._cache_dir).free,
            "stale": self._stale_reason,
            "certificate_expires_s": _expiry_s(self._tier.tls_of(self._node)),
            **asdict(self._figures),
        }
        new_file = self._run_dir / f".{_STATUS_FILE}"
        new_file.write_text(json.dumps(page))
        new_file.chmod(0o644)  # nginx's workers run as another user
        new_file.replace(self._run_dir / _STATUS_FILE)

    def _stamps(self) -> list[tuple[int, int]]:
        """Return modification time and inode of each source, which differ after a change."""
        stamps: list[tuple[int, int]] = []
        for path in self._sources:
            with suppress(OSError):  # the file is missing, such as while it is being replaced
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_ino))
        return stamps


def _expiry_s(tls: Tls | None) -> float | None:
    """Return when a node's certificates expire, in seconds since the epoch.

    Return None if there are no certificates, or the time is unknown: a file is being replaced, or
    the extra `cluster` is not installed.
    """
    if tls is None:
        return None
    try:
        from shardcache.cluster.authority import expiry_s

        return expiry_s(tls)
    except (OSError, ValueError, ModuleNotFoundError):
        return None
