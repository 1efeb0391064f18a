"""Steps of an installation on this node or in the image of one: files, folders, links, commands."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from shardcache.errors import ConfigError, DaemonError

USER, GROUP = "shardcache", "training"
UNITS = Path("/etc/systemd/system")
CONFIG = Path("/etc/shardcache/shardcache.toml")
SHIPPED_PROGRAM = "/opt/shardcache/bin/shardcache"
"""The program in the units as they are shipped."""

_SYSUSERS = Path("/usr/lib/sysusers.d/shardcache.conf")
# Folders that ProtectHome= hides from a service.
_HIDDEN = ("/home", "/root", "/run/user")
_PLAIN = re.compile(r"[\w/.+-]+")


@dataclass(frozen=True, slots=True)
class Done:
    """One step of an installation.

    Attributes:
        what: the file, or the command.
        state: `created`, `updated`, `unchanged`, `kept` (it differs, and belongs to the operator) or `ran`.
    """

    what: str
    state: str


@dataclass(frozen=True, slots=True)
class Target:
    """A node, or its image: every step can be taken again without harm, and returns what became of it.

    Methods raise ConfigError for a file that cannot be written, and DaemonError for a command that fails.

    Attributes:
        root: `/`, or the root folder of an image.
        dry_run: True to change nothing, and only return what would be changed.
    """

    root: Path
    dry_run: bool

    @property
    def is_image(self) -> bool:
        """True if the steps are not for the running system."""
        return self.root != Path("/")

    def users(self) -> Iterator[Done]:
        """Create the daemon's user, and the group of the users who train."""
        yield self.write(_SYSUSERS, shipped("shardcache.sysusers"))
        yield self.command("systemd-sysusers", *([f"--root={self.root}"] if self.is_image else []))

    def enable(self, unit: str) -> Iterator[Done]:
        """Have systemd start a unit at boot, and now unless this is an image."""
        if self.is_image:
            yield self.command("systemctl", f"--root={self.root}", "enable", unit)
        else:
            yield self.command("systemctl", "daemon-reload")
            yield self.command("systemctl", "enable", "--now", unit)

    def read(self, path: Path) -> str | None:
        """Return the text of a file; None if it does not exist."""
        at = self.at(path)
        with _translated(at):
            return at.read_text() if at.exists() else None

    def write(
        self, path: Path, text: str, mode: int = 0o644, *, group: str | None = None, replace: bool = True
    ) -> Done:
        """Write a file as a whole, owned by root; an existing one is kept unless `replace`."""
        at, former = self.at(path), self.read(path)
        if former == text or (former is not None and not replace):
            return Done(str(at), "unchanged" if former == text else "kept")
        if not self.dry_run:
            with _translated(at):
                _make_folder(at.parent)
                new = at.with_name(f".{at.name}.new")
                new.touch(mode=0o600)
                new.write_text(text)
                if group is not None:
                    self._own(new, None, group)
                new.chmod(mode)
                new.replace(at)
        return Done(str(at), "created" if former is None else "updated")

    def folder(self, path: Path, group: str, mode: int) -> Done:
        """Create a folder that belongs to the daemon's user; an existing one is left alone."""
        at = self.at(path)
        with _translated(at):
            if at.is_dir():
                return Done(str(at), "unchanged")
            if not self.dry_run:
                _make_folder(at)
                self._own(at, USER, group)
                at.chmod(mode)
        return Done(str(at), "created")

    def link(self, path: Path, to: Path) -> Done:
        """Create or change a symbolic link; a file in its place is kept."""
        at = self.at(path)
        with _translated(at):
            if at.is_symlink() and at.readlink() == to:
                return Done(str(at), "unchanged")
            if at.exists() and not at.is_symlink():
                return Done(str(at), "kept")
            state = "updated" if at.is_symlink() else "created"
            if not self.dry_run:
                _make_folder(at.parent)
                at.unlink(missing_ok=True)
                at.symlink_to(to)
        return Done(str(at), state)

    def command(self, *command: str) -> Done:
        """Run a command."""
        line = shlex.join(command)
        if not self.dry_run:
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                raise ConfigError(f"there is no {command[0]} here", remedy="install systemd") from None
            if done.returncode != 0:
                raise DaemonError(
                    f"{line} failed: {done.stderr.strip() or f'exit code {done.returncode}'}",
                    remedy="see journalctl -u shardcache -u shardcache-tier; when the cause is mended, run the same "
                    "command again",
                )
        return Done(line, "ran")

    def at(self, path: Path) -> Path:
        """Return where a path of the node is for this process."""
        return self.root / path.relative_to("/")

    def _own(self, path: Path, user: str | None, group: str) -> None:
        uid = -1 if user is None else self._id("passwd", user, lambda name: pwd.getpwnam(name).pw_uid)
        os.chown(path, uid, self._id("group", group, lambda name: grp.getgrnam(name).gr_gid))

    def _id(self, file: str, name: str, of_this_node: Callable[[str], int]) -> int:
        if not self.is_image:
            return of_this_node(name)
        lines = (line.split(":") for line in self.at(Path("/etc", file)).read_text().splitlines())
        return next(int(fields[2]) for fields in lines if fields[0] == name)


def check_visible(path: Path, remedy: str = "choose a path outside of home folders") -> None:
    """Raise ConfigError for a path in a home folder, or one that a unit would have to quote."""
    if any(path.is_relative_to(hidden) for hidden in _HIDDEN):
        raise ConfigError(f"the daemon cannot see {path}: home folders are hidden from it", remedy=remedy)
    if not _PLAIN.fullmatch(str(path)):
        raise ConfigError(f"{str(path)!r} cannot be written into a unit", remedy="use a path without spaces and signs")


def shipped(name: str) -> str:
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


def _make_folder(path: Path) -> None:
    """Create a folder and its parents so that the service may enter them, whatever root's umask."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)
