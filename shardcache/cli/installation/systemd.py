"""The systemd service of a node: its files, its user, and the commands that put it into service."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shardcache.errors import ConfigError, DaemonError

SERVICE = "shardcache.service"
_USER, _GROUP = "shardcache", "training"
_UNITS = Path("/etc/systemd/system")
_CONFIG = Path("/etc/shardcache/shardcache.toml")
_SYSUSERS = Path("/usr/lib/sysusers.d/shardcache.conf")
_LINK = Path("/usr/local/bin/shardcache")
# The program in the unit as it is shipped.
_SHIPPED_PROGRAM = "/opt/shardcache/bin/shardcache"
# Folders that ProtectHome= hides from the daemon.
_HIDDEN = ("/home", "/root", "/run/user")
_PLAIN = re.compile(r"[\w/.+-]+")
_CACHE_DIR = """\
[Unit]
RequiresMountsFor={0}
[Service]
Environment=SHARDCACHE_CACHE_DIR={0}
ReadWritePaths={0}
"""


@dataclass(frozen=True, slots=True)
class Done:
    """One step of the installation.

    Attributes:
        what: the file, or the command.
        state: `created`, `updated`, `unchanged`, `kept` (it differs, and belongs to the operator) or `ran`.
    """

    what: str
    state: str


def this_program() -> Path:
    """Return the path of the running `shardcache`. Raises ConfigError if a service could not start it."""
    program = Path(sys.executable).parent / "shardcache"
    if not program.exists():
        raise ConfigError(f"there is no {program}", remedy="name the program to start with --program")
    for place in (program, Path(sys.executable).resolve()):
        _check_visible(
            place,
            "python3 -m venv /opt/shardcache && /opt/shardcache/bin/pip install 'shardcache[daemon]' && "
            f"{_SHIPPED_PROGRAM} install systemd",
        )
    return program


def _check_visible(path: Path, remedy: str) -> None:
    """Raise ConfigError for a path in a home folder, or one that a unit would have to quote."""
    if any(path.is_relative_to(hidden) for hidden in _HIDDEN):
        raise ConfigError(f"the daemon cannot see {path}: home folders are hidden from it", remedy=remedy)
    if not _PLAIN.fullmatch(str(path)):
        raise ConfigError(f"{str(path)!r} cannot be written into a unit", remedy="use a path without spaces and signs")


class Installation:
    """The service below a root folder, as docs/deploy-systemd.md describes it; made in steps, and again without harm.

    Raises ConfigError for a program or a folder that the service could not use.

    Args:
        root: `/`, or the root folder of an image.
        program: the `shardcache` that the service starts.
        cache_dir: folder for the cache; None for that of the unit.
        dry_run: True to change nothing, and only tell what would be changed.
    """

    def __init__(self, root: Path, program: Path, cache_dir: Path | None, *, dry_run: bool) -> None:
        for path in filter(None, (program, cache_dir)):
            _check_visible(path, "choose a path outside of home folders")
        self._root = root
        self._program = program
        self._cache_dir = cache_dir
        self._dry_run = dry_run
        self._is_image = root != Path("/")

    def run(self) -> Iterator[Done]:
        """Take the steps, and yield each when it is done.

        Raises ConfigError for a file that cannot be written, and DaemonError for a command that fails.
        """
        yield self._write(_SYSUSERS, _shipped("shardcache.sysusers"))
        yield self._command("systemd-sysusers", *([f"--root={self._root}"] if self._is_image else []))
        yield self._write(_CONFIG, _shipped("shardcache.toml"), 0o640, group=_USER, replace=False)
        if self._cache_dir is not None:
            yield self._folder(self._cache_dir)
            yield self._write(_UNITS / f"{SERVICE}.d" / "cache-dir.conf", _CACHE_DIR.format(self._cache_dir))
        yield self._write(_UNITS / SERVICE, _shipped(SERVICE).replace(_SHIPPED_PROGRAM, str(self._program)))
        yield self._write(_UNITS / "shardcache.socket", _shipped("shardcache.socket"))
        if self._program != _LINK:
            yield self._link()
        if self._is_image:
            yield self._command("systemctl", f"--root={self._root}", "enable", SERVICE)
        else:
            yield self._command("systemctl", "daemon-reload")
            yield self._command("systemctl", "enable", "--now", SERVICE)

    def _write(
        self, path: Path, text: str, mode: int = 0o644, *, group: str | None = None, replace: bool = True
    ) -> Done:
        at = self._at(path)
        with _translated(at):
            former = at.read_text() if at.exists() else None
            if former == text or (former is not None and not replace):
                return Done(str(at), "unchanged" if former == text else "kept")
            if not self._dry_run:
                at.parent.mkdir(parents=True, exist_ok=True)
                new = at.with_name(f".{at.name}.new")
                new.touch(mode=0o600)
                new.write_text(text)
                if group is not None:
                    self._own(new, None, group)
                new.chmod(mode)
                new.replace(at)
        return Done(str(at), "created" if former is None else "updated")

    def _folder(self, path: Path) -> Done:
        at = self._at(path)
        with _translated(at):
            if at.is_dir():
                return Done(str(at), "unchanged")
            if not self._dry_run:
                at.mkdir(parents=True)
                self._own(at, _USER, _GROUP)
                at.chmod(0o750)
        return Done(str(at), "created")

    def _link(self) -> Done:
        at = self._at(_LINK)
        with _translated(at):
            if at.is_symlink() and at.readlink() == self._program:
                return Done(str(at), "unchanged")
            if at.exists() and not at.is_symlink():
                return Done(str(at), "kept")
            state = "updated" if at.is_symlink() else "created"
            if not self._dry_run:
                at.parent.mkdir(parents=True, exist_ok=True)
                at.unlink(missing_ok=True)
                at.symlink_to(self._program)
        return Done(str(at), state)

    def _command(self, *command: str) -> Done:
        line = shlex.join(command)
        if not self._dry_run:
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                raise ConfigError(f"there is no {command[0]} here", remedy="install systemd") from None
            if done.returncode != 0:
                raise DaemonError(
                    f"{line} failed: {done.stderr.strip() or f'exit code {done.returncode}'}",
                    remedy="see journalctl -u shardcache; when the cause is mended, run the same command again",
                )
        return Done(line, "ran")

    def _own(self, path: Path, user: str | None, group: str) -> None:
        uid = -1 if user is None else self._id("passwd", user, lambda name: pwd.getpwnam(name).pw_uid)
        os.chown(path, uid, self._id("group", group, lambda name: grp.getgrnam(name).gr_gid))

    def _id(self, file: str, name: str, of_this_node: Callable[[str], int]) -> int:
        if not self._is_image:
            return of_this_node(name)
        lines = (line.split(":") for line in self._at(Path("/etc", file)).read_text().splitlines())
        return next(int(fields[2]) for fields in lines if fields[0] == name)

    def _at(self, path: Path) -> Path:
        return self._root / path.relative_to("/")


def _shipped(name: str) -> str:
    """Return a file of deploy/systemd, which the package contains."""
    return (resources.files(__package__) / "units" / name).read_text()


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that says what to do."""
    try:
        yield
    except OSError as exn:
        remedy = "run it as root" if isinstance(exn, PermissionError) else "make its folder writable"
        raise ConfigError(f"cannot write {path}: {exn.strerror or exn}", remedy=remedy) from None
