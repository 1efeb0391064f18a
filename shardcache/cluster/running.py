"""One node's nginx as a child process: its folders, its configuration, its figures. Blocking."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

from shardcache.cluster import nginx_process
from shardcache.cluster.figures import AccessLog, Figures, measure
from shardcache.cluster.nginx import ACCESS_LOG, PID_FILE, STATUS_FILE, render
from shardcache.cluster.node_list import Node
from shardcache.cluster.tier import Tier, Tls
from shardcache.errors import ConfigError, ShardcacheError
from shardcache.store.disk import fsync_path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT, _CLEAN = "boot", "clean"
_PARTS = "parts"
_PERIOD_S = 2.0
_RETRY_S = 5.0
_DISK_PERIOD_S = 60.0


class NodeTier:
    """nginx of one node, with a configuration that follows its sources.

    Args:
        read: returns the current tier; called again whenever a file in `watched` has changed.
        name: name or address of this node in it.
        watched: files whose change has the configuration written again and nginx reload it.
        say: called with each message for the operator.
        ready: called with a line about the tier, once nginx listens, and after each change.
    """

    def __init__(
        self,
        read: Callable[[], Tier],
        name: str,
        watched: tuple[Path, ...],
        *,
        say: Callable[[str], object],
        ready: Callable[[str], object],
    ) -> None:
        self._read, self._name, self._watched, self._say, self._ready = read, name, watched, say, ready
        self._seen = self._stamps()  # first: what changes later is read again
        self._tier = read()
        self._node = self._tier.node(name)
        self._folder, self._run = self._tier.cache(self._node), self._tier.run(self._node)
        self._config = self._run / "nginx.conf"
        self._figures, self._started_s = Figures(), time.time()
        self._stale: str | None = None  # the reason that nginx does not use the sources as they are now
        self._tried_s = 0.0

    def run(self, stopping: Event) -> int:
        """Run nginx until `stopping` is set, or it ends; return its exit status. Raises ConfigError."""
        nginx = nginx_process.program()
        try:
            for folder in (self._folder, self._run):
                if not folder.exists():
                    folder.mkdir(parents=True, mode=0o700)
                    if os.geteuid() == 0:
                        shutil.chown(folder, self._tier.user or nginx_process.default_user(nginx))
            if prepare(self._folder):
                self._say("this machine went down without stopping the tier: its cache was cleared")
            self._write(self._tier, self._node)
        except OSError as exn:
            remedy = "choose another --cache-dir and --run-dir, or give this user the right to write there"
            raise ConfigError(f"cannot write {exn.filename}: {exn.strerror}", remedy=remedy) from None
        nginx_process.check(nginx, self._config)
        log = AccessLog(self._folder / ACCESS_LOG, self._tier.owner_port)
        process = nginx_process.start(nginx, self._config)
        try:
            if nginx_process.wait_until_listening(process, self._run / PID_FILE):
                self._ready(_line(self._tier))
            self._follow(nginx, process, log, stopping)
        finally:
            status = nginx_process.end(process)
        finish(self._folder)
        return 0 if stopping.is_set() else status

    def _follow(self, nginx: str, process: nginx_process.Process, log: AccessLog, stopping: Event) -> None:
        measured_s = -_DISK_PERIOD_S
        while process.poll() is None:
            if time.monotonic() - measured_s >= _DISK_PERIOD_S:
                measure(self._folder / _PARTS, self._figures)
                measured_s = time.monotonic()
            log.read(self._figures)
            if log.rotate():
                process.send_signal(signal.SIGUSR1)
            self._publish()
            if stopping.wait(_PERIOD_S):
                return
            is_due = self._stale is not None and time.monotonic() - self._tried_s >= _RETRY_S
            if (now := self._stamps()) != self._seen or is_due:
                self._seen, self._tried_s = now, time.monotonic()
                self._reload(nginx, process)

    def _reload(self, nginx: str, process: nginx_process.Process) -> None:
        """Have nginx use the sources as they are now; until they can be used, the former configuration stays."""
        former = self._config.read_text()
        try:
            tier = self._read()
            self._write(tier, tier.node(self._name))
            nginx_process.check(nginx, self._config)
            nginx_process.reload(process, tier.front, tier.digest)
        except (ShardcacheError, OSError) as exn:
            self._config.write_text(former)
            reason = exn.message if isinstance(exn, ShardcacheError) else str(exn)
            if reason != self._stale:
                self._say(f"the former configuration stays in use: {exn}")
            self._stale = reason
            return
        self._tier, self._stale = tier, None
        self._ready(_line(tier))

    def _write(self, tier: Tier, node: Node) -> None:
        self._config.write_text(render(tier, node))

    def _publish(self) -> None:
        """Write the figures to the file that nginx serves."""
        free_bytes = shutil.disk_usage(self._folder).free
        page: dict[str, object] = {"node": self._node.name, "started_s": self._started_s, "free_bytes": free_bytes}
        page |= {"stale": self._stale, "certificate_expires_s": _expiry_s(self._tier.tls_of(self._node))}
        fresh = self._run / f".{STATUS_FILE}"
        fresh.write_text(json.dumps(page | self._figures.to_json()))
        fresh.chmod(0o644)  # for nginx's workers
        fresh.replace(self._run / STATUS_FILE)

    def _stamps(self) -> list[tuple[int, int] | None]:
        stamps: list[tuple[int, int] | None] = []
        for path in self._watched:
            try:
                found = path.stat()
                stamps.append((found.st_mtime_ns, found.st_ino))
            except OSError:  # being replaced
                stamps.append(None)
        return stamps


def prepare(folder: Path, boot_id: str | None = None) -> bool:
    """Make a cache folder ready for use; return True if its parts were removed.

    After a power loss, files may hold bytes that never reached the disk. Parts are kept if this machine has not booted
    since they were written, or if the tier was stopped before it went down.
    """
    boot_id = boot_id or _BOOT_ID.read_text().strip()
    boot, clean = folder / _BOOT, folder / _CLEAN
    former = boot.read_text() if boot.exists() else None
    unclean = (folder / _PARTS).exists() and former != boot_id and not clean.exists()
    if unclean:
        shutil.rmtree(folder / _PARTS)
    boot.write_text(boot_id)
    clean.unlink(missing_ok=True)
    fsync_path(folder)
    return unclean


def finish(folder: Path) -> None:
    """Mark a folder as cleanly stopped, once all of it is on the disk."""
    os.sync()
    (folder / _CLEAN).touch()
    fsync_path(folder)


def _expiry_s(tls: Tls | None) -> float | None:
    """Return the time at which a node's certificates expire; None if it has none, or cannot tell."""
    try:
        from shardcache.cluster.authority import expiry_s

        return None if tls is None else expiry_s(tls)
    except (OSError, ValueError, ModuleNotFoundError):  # being replaced; nginx was started without the extra `cluster`
        return None


def _line(tier: Tier) -> str:
    count = len(tier.nodes)
    return f"{count} node{'' if count == 1 else 's'}, digest {tier.digest}"
