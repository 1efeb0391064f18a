"""The filesystem of a path, from /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted filesystem: its mount point, type and source."""

    folder: Path
    kind: str
    source: str


def mount_of(path: Path, table: Iterable[str] | None = None) -> Mount:
    """Return the filesystem of a path, which need not exist; `table` holds lines of mountinfo."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines() if table is None else table
    place = path.resolve()
    mounts = [mount for mount in map(_parse, lines) if place.is_relative_to(mount.folder)]
    # The last filesystem mounted on a folder hides the others.
    return max(reversed(mounts), key=lambda mount: len(mount.folder.parts))


def _parse(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    kind, source = after.split(" ", 2)[:2]
    return Mount(Path(_unescaped(before.split(" ")[4])), kind, _unescaped(source))


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)


def nearest(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
