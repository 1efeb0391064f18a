"""Images that containers are made of: this machine's own files, or what the Dockerfile gives."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from support.platforms.oci import Json, Mount

ROOT = Path(__file__).parents[3]
_PROGRAMS = ("buildah", "mmdebstrap", "unshare")
_BUILD_LIMIT_S = 1800
_BASE = ("python3-venv", "python3-pip", "python-is-python3")
# What pip goes by where a site has a mirror, or a certificate authority, of its own.
_SITES_OWN = ("/etc/ssl/certs", "/etc/pip.conf")
# All in a mount namespace of its own: what buildah mounts is gone with it, and so is what it remembers of layers below
# /var/lib, wherever its folders are. Arguments: the folder, the Dockerfile's, options. The tier's image begins with the
# steps that the daemon's has taken.
_BUILD = """
folder=$0; context=$1; shift
mount -t tmpfs none /var/lib
with() { buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver overlay "$@"; }
base=$(with from scratch)
with add --quiet "$base" "$folder/base.tar" / >&2
with commit --quiet --rm "$base" localhost/base >&2
for target in daemon tier; do
    named="--target $target"
    [ $target != daemon ] || named=
    with build --layers --pull-never --isolation chroot --build-arg BASE=localhost/base "$@" $named \
        --tag "localhost/$target" "$context" >&2
    made=$(with from --pull-never "localhost/$target")
    cp --archive "$(with mount "$made")" "$folder/$target"
    with inspect --type image "localhost/$target" >"$folder/$target.json"
done
"""


class Image(Protocol):
    @property
    def entrypoint(self) -> str:
        """Program that `args` are for where a container names no command."""

    def lay_out(self, folder: Path) -> Path:
        """Return where its files are for one container: in that folder, which it makes, or in one for all."""

    def mounts(self) -> Iterator[Mount]:
        """Return what it has besides its files."""


@dataclass(frozen=True, slots=True)
class HostImage:
    """This machine's own programs, and the environment that runs the tests."""

    root: Path  # an empty folder of its own, in which mount points are made
    commands: Mapping[str, str]  # what can be run by its bare name: Python's module, or none for Python itself
    entrypoint: str  # as in Image

    def __post_init__(self) -> None:
        bin_dir, etc = self.root / "image", self.root / "etc"
        for folder in (bin_dir, etc):
            folder.mkdir(parents=True)
        for name, module in self.commands.items():
            script = bin_dir / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {f"-m {module} " if module else ""}"$@"\n')
            script.chmod(0o755)
        (etc / "passwd").write_text("root:x:0:0::/:/bin/sh\nshardcache:x:52780:52780::/tmp:/bin/sh\n")
        (etc / "group").write_text("root:x:0:\nshardcache:x:52780:\n")
        # In a cluster, the headless Service says so.
        (etc / "hosts").write_text("127.0.0.1 localhost train-0.train train-1.train\n")
        for link in ("bin", "lib", "lib64", "sbin"):
            (self.root / link).symlink_to(f"usr/{link}")

    def lay_out(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.root, folder, symlinks=True))

    def mounts(self) -> Iterator[Mount]:
        folders = {Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), *map(Path, filter(None, sys.path))}
        whole = sorted(folder.resolve() for folder in folders if folder.is_dir())
        for folder in whole:
            if not any(folder != other and folder.is_relative_to(other) for other in whole):
                yield Mount(folder, str(folder), read_only=True)


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """Image of the Dockerfile on a Debian with Python, in place of the image that it names."""

    root: Path  # its files
    config: Json  # what it says of user, environment and command

    @property
    def entrypoint(self) -> str:
        return str(self.config["Entrypoint"][0])

    @property
    def env(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.config["Env"])

    def lay_out(self, folder: Path) -> Path:
        """Return the only copy: containers of this image have a read-only root."""
        return self.root

    def mounts(self) -> Iterator[Mount]:
        return iter(())


def why_not_built() -> str | None:
    """Return why no image can be built here, or None."""
    if os.geteuid() != 0:
        return "to build an image takes root"
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"no {missing[0]} here: apt-get install buildah mmdebstrap" if missing else None


def build(folder: Path) -> tuple[BuiltImage, BuiltImage]:
    """Build the project's Dockerfile below a folder, with packages from Debian's and Python's indexes.

    Returns the image that is built where no target is named, and that of the target `tier`.

    Raises CalledProcessError where a step fails.
    """
    _run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(_BASE)}", "bookworm", folder / "base.tar")
    own = [f"--volume={path}:{path}:ro" for path in _SITES_OWN if Path(path).exists()]
    _run("unshare", "--mount", "sh", "-euc", _BUILD, folder, ROOT, *own)
    return _built(folder, "daemon"), _built(folder, "tier")


def _built(folder: Path, target: str) -> BuiltImage:
    said = json.loads((folder / f"{target}.json").read_text())
    return BuiltImage(folder / target, said["OCIv1"]["config"])


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=_BUILD_LIMIT_S)
