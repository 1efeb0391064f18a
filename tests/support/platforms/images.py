"""Images that containers are made of: this machine's own files, or those that a test has."""

import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from support.platforms.oci import Mount


class Image(Protocol):
    @property
    def entrypoint(self) -> str:
        """Program that `args` are for where a container names no command."""

    def lay_out(self, folder: Path) -> Path:
        """Return the folder of a container's files: a new one there, or one for all."""

    def mounts(self) -> Iterator[Mount]:
        """Return what it has besides its files."""


@dataclass(frozen=True, slots=True)
class HostImage:
    """This machine's own programs, and the environment that runs the tests."""

    root: Path  # an empty folder of its own, in which mount points are made
    # What can be run by its bare name: Python's module, or none for Python itself.
    commands: Mapping[str, str]
    entrypoint: str  # as in Image

    def __post_init__(self) -> None:
        bin_dir = self.root / "image"
        etc = self.root / "etc"
        for folder in (bin_dir, etc):
            folder.mkdir(parents=True)
        for name, module in self.commands.items():
            script = bin_dir / name
            script.write_text(
                f'#!/bin/sh\nexec {sys.executable} {f"-m {module} " if module else ""}"$@"\n'
            )
            script.chmod(0o755)
        (etc / "passwd").write_text(
            "root:x:0:0::/:/bin/sh\nshardcache:x:52780:52780::/tmp:/bin/sh\n"
        )
        (etc / "group").write_text("root:x:0:\nshardcache:x:52780:\n")
        # In a cluster, the headless Service says so.
        (etc / "hosts").write_text("127.0.0.1 localhost train-0.train train-1.train\n")
        for link in ("bin", "lib", "lib64", "sbin"):
            (self.root / link).symlink_to(f"usr/{link}")

    def lay_out(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.root, folder, symlinks=True))

    def mounts(self) -> Iterator[Mount]:
        folders = {
            Path("/usr"),
            Path(sys.prefix),
            Path(sys.base_prefix),
            *map(Path, filter(None, sys.path)),
        }
        whole = sorted(folder.resolve() for folder in folders if folder.is_dir())
        for folder in whole:
            if not any(folder != other and folder.is_relative_to(other) for other in whole):
                yield Mount(folder, str(folder), read_only=True)
