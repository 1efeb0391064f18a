"""Filesystems that a test may fill, spoil and remove as root, and the kubelet's folders."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_BALLAST = "ballast"


def may_mount() -> bool:
    """Return whether this process may mount: root in a container often may not."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(
            ["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False
        )
        if tried.returncode == 0:
            _run("umount", folder)
        return tried.returncode == 0


class Tmpfs:
    """A filesystem in memory, at a folder of its own, with limits; a context manager."""

    def __init__(self, folder: Path, size_bytes: int, inodes: int = 0) -> None:
        self.folder = folder
        self._options = f"size={size_bytes},nr_inodes={inodes}"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", self._options, "none", str(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "--lazy", str(self.folder))

    def free_bytes(self) -> int:
        stat = os.statvfs(self.folder)
        return stat.f_bavail * stat.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        ballast = self.folder / _BALLAST
        ballast.mkdir()
        with (ballast / "bytes").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free_bytes() - leave_bytes)

    def use_up_inodes(self) -> None:
        ballast = self.folder / _BALLAST
        ballast.mkdir()
        for number in range(os.statvfs(self.folder).f_ffree):
            (ballast / str(number)).touch()

    def relieve(self) -> None:
        shutil.rmtree(self.folder / _BALLAST)

    def turn_read_only(self) -> bool:
        """Remount it so; False while somebody has a file of it open for writing."""
        command = ["mount", "-o", "remount,ro", str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def turn_writable(self) -> None:
        _run("mount", "-o", "remount,rw", str(self.folder))


class Bind:
    """A folder that shows another one while it is attached; a context manager."""

    def __init__(self, source: Path, folder: Path) -> None:
        self._source = source
        self._folder = folder

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        _run("mount", "--bind", str(self._source), str(self._folder))

    def detach(self) -> None:
        _run("umount", "--lazy", str(self._folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


_DATA = "..data"


class MountedFiles:
    """Folder whose files all change at the same moment.

    Each file is a link into `..data`, which is a link to a folder with the current files.

    Attributes:
        folder: the folder; created if it is missing.
    """

    def __init__(self, folder: Path, mode: int = 0o644, group: int | None = None) -> None:
        self.folder = folder
        self._mode = mode
        self._group = -1 if group is None else group
        folder.mkdir(parents=True, exist_ok=True)

    def replace(self, files: Mapping[str, str]) -> None:
        fresh = Path(tempfile.mkdtemp(prefix="..", dir=self.folder))
        fresh.chmod(0o755)
        for name, text in files.items():
            (fresh / name).write_text(text)
            os.chown(fresh / name, -1, self._group)
            (fresh / name).chmod(self._mode)
        data = self.folder / _DATA
        renamed = self.folder / "..data_tmp"
        former = data.resolve() if data.is_symlink() else None
        renamed.symlink_to(fresh.name)
        renamed.replace(data)
        for name in files:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"{_DATA}/{name}")
        for path in self.folder.iterdir():
            if path.is_symlink() and not path.exists():
                path.unlink()
        if former is not None:
            shutil.rmtree(former)
