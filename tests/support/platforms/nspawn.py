"""A machine run by systemd: a container over this one's files, with changes in memory."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from support import ROOT
from support.lifetime import Lifetime
from support.programs.daemon import eventually
from support.programs.pages import recipe
from support.programs.processes import logged

DEPLOY = ROOT / "deploy" / "systemd"
_NEEDED = ("systemd-nspawn", "nsenter", "unshare")
_AT = Path("/opt/shardcache")
_LIMIT_S = 300
# The mount is this process's own: it is gone with it, however that ends.
_BOOT = 'mount --bind / "$0" && exec systemd-nspawn --directory="$0" "$@"'


def why_not() -> str | None:
    """Return why there can be none here, or None."""
    if os.geteuid() != 0:
        return "a container takes root"
    missing = [program for program in _NEEDED if shutil.which(program) is None]
    return f"no {missing[0]} here: apt-get install systemd-container" if missing else None


class Machine(Lifetime):
    """A context manager: it has booted on entering, and nothing is left of it on leaving.

    Args:
        binds: folders of the host and where they are seen, read-only.
        disks: folders of the host that are its disks, by where they are seen; their files
            outlive it.
    """

    def __init__(
        self, binds: Mapping[Path, Path], disks: Mapping[Path, Path] | None = None
    ) -> None:
        self._binds = binds
        self._disks = disks or {}
        self._leader = 0

    def begin(self) -> None:
        root = Path(self.parts.enter_context(tempfile.TemporaryDirectory(prefix="machine-")))
        (root / "root").mkdir()
        flags = [
            "--volatile=overlay",
            "--register=no",
            "--keep-unit",
            "--link-journal=no",
            "--console=pipe",
        ]
        flags += [
            f"--uuid={uuid.uuid4().hex}",
            *(f"--bind-ro={host}:{here}" for host, here in self._binds.items()),
        ]
        flags += [f"--bind={host}:{here}" for host, here in self._disks.items()]
        command = ["unshare", "--mount", "sh", "-c", _BOOT, str(root / "root"), *flags, "--boot"]
        nspawn = logged([*command, "--", "--unit=basic.target"], root / "log")
        self.parts.callback(self._end, nspawn)
        eventually(lambda: self._has_begun(nspawn), limit_s=_LIMIT_S)
        eventually(lambda: self.state("basic.target") == "active", limit_s=_LIMIT_S)

    def _end(self, nspawn: subprocess.Popen[bytes]) -> None:
        groups = self._cgroups()
        # Its first process takes all others along.
        os.kill(self._leader or nspawn.pid, signal.SIGKILL)
        nspawn.wait(_LIMIT_S)
        for group in groups:
            for folder in sorted((group, *group.rglob("*/")), reverse=True):
                folder.rmdir()

    def _cgroups(self) -> list[Path]:
        """Return nspawn's folder in each hierarchy, which it removes only under systemd."""
        lines = (
            Path(f"/proc/{self._leader}/cgroup").read_text().splitlines() if self._leader else []
        )
        payloads = {line.split(":", 2)[2].removesuffix("/init.scope").lstrip("/") for line in lines}
        payload = next((Path(name) for name in payloads if name.endswith("payload")), None)
        found = [] if payload is None else [payload, payload.with_name("supervisor")]
        roots = (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir())
        return [root / name for root in roots for name in found if (root / name).is_dir()]

    def _has_begun(self, nspawn: subprocess.Popen[bytes]) -> bool:
        if nspawn.poll() is not None:
            raise RuntimeError(f"the container ended with status {nspawn.returncode}")
        started = psutil.Process(nspawn.pid).children()
        self._leader = next(
            (child.pid for child in started if child.name() in ("systemd", "init")), 0
        )
        return self._leader != 0

    def run(self, *command: str | Path, user: str | None = None, fails: bool = False) -> str:
        """Run a command in it, as root or as a user; return what it printed, errors included.

        Raises AssertionError with that, and the end of the journal, unless it ends as it should.
        """
        become = [] if user is None else ["runuser", "-u", user, "--"]
        done = self._enter(*become, *map(str, command))
        if (done.returncode != 0) != fails:
            journal = self._enter("journalctl", "--no-pager", "--lines=30").stdout
            raise AssertionError(
                f"{command} ended with status {done.returncode}:\n{done.stdout}\n{journal}"
            )
        return done.stdout

    def _enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        spaces = ("--mount", "--pid", "--uts", "--ipc", "--net", "--root", "--wdns=/")
        return subprocess.run(
            ("nsenter", f"--target={self._leader}", *spaces, *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            timeout=_LIMIT_S,
            check=False,
        )

    def write(self, path: str, text: str) -> None:
        self.run("sh", "-c", 'mkdir -p "$(dirname "$0")" && printf %s "$1" > "$0"', path, text)

    def property(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", unit).strip()

    def state(self, unit: str) -> str:
        """Return `active`, `inactive`, `failed` …, and nothing while systemd is not there yet."""
        try:
            return self.property(unit, "ActiveState")
        except AssertionError:
            return ""


@contextmanager
def installed(
    environment: Mapping[str, str], disks: Mapping[Path, Path] | None = None
) -> Iterator[Machine]:
    """Boot a machine with the daemon installed as documented; deploy/systemd is at /mnt.

    This very interpreter runs it: it may be installed where services do not see it, as below /root,
    /home or /tmp.
    """
    folders = [
        Path(sys.base_prefix),
        *(Path(entry) for entry in sys.path if entry and not _is_below_prefix(entry)),
    ]
    binds = {
        folder: _AT / "python" / str(number)
        for number, folder in enumerate(folders)
        if folder.is_dir()
    }
    home, *path = binds.values()
    variables = (
        f"PYTHONHOME={home} LD_LIBRARY_PATH={home}/lib PYTHONPATH={':'.join(map(str, path))}"
    )
    python = f"{home}/bin/python{sys.version_info.major}.{sys.version_info.minor} -s -P"
    with Machine({**binds, DEPLOY: Path("/mnt")}, disks) as machine:
        machine.write(
            f"{_AT}/bin/shardcache",
            f'#!/bin/sh\nexport {variables}\nexec {python} -m shardcache "$@"\n',
        )
        machine.run("chmod", "755", f"{_AT}/bin/shardcache")
        lines = "\n".join(f"{name}={value}" for name, value in environment.items())
        machine.write("/etc/shardcache/environment", lines)
        machine.run("chmod", "600", "/etc/shardcache/environment")
        machine.run("sh", "-ec", "cd /mnt\n" + recipe("systemd-sysusers"))
        yield machine


def _is_below_prefix(entry: str) -> bool:
    return Path(entry).is_relative_to(sys.base_prefix)
