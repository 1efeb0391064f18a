"""The daemon's systemd service: its files, its user, and the commands that put it into service."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcache.cli.installation.target import (
    CONFIG,
    GROUP,
    SHIPPED_PROGRAM,
    UNITS,
    USER,
    Done,
    Target,
    check_visible,
    shipped,
)
from shardcache.errors import ConfigError

SERVICE = "shardcache.service"
_LINK = Path("/usr/local/bin/shardcache")
_CACHE_DIR = """\
[Unit]
RequiresMountsFor={0}
[Service]
Environment=SHARDCACHE_CACHE_DIR={0}
ReadWritePaths={0}
"""


def this_program() -> Path:
    """Return the path of the running `shardcache`. Raises ConfigError if a service could not start it."""
    program = Path(sys.executable).parent / "shardcache"
    if not program.exists():
        raise ConfigError(f"there is no {program}", remedy="name the program to start with --program")
    for place in (program, Path(sys.executable).resolve()):
        check_visible(
            place,
            "python3 -m venv /opt/shardcache && /opt/shardcache/bin/pip install 'shardcache[daemon]' && "
            f"{SHIPPED_PROGRAM} install systemd",
        )
    return program


@dataclass(frozen=True, slots=True)
class DaemonService:
    """The service as docs/deploy-systemd.md describes it. Raises ConfigError for a path that it could not use.

    Attributes:
        target: the node, or its image.
        program: the `shardcache` that the service starts.
        cache_dir: folder for the cache; None for that of the unit.
    """

    target: Target
    program: Path
    cache_dir: Path | None

    def __post_init__(self) -> None:
        for path in filter(None, (self.program, self.cache_dir)):
            check_visible(path)

    def install(self) -> Iterator[Done]:
        """Take the steps, and yield each when it is done. Raises as `Target`."""
        target = self.target
        yield from target.users()
        yield target.write(CONFIG, shipped("shardcache.toml"), 0o640, group=USER, replace=False)
        if self.cache_dir is not None:
            yield target.folder(self.cache_dir, GROUP, 0o750)
            yield target.write(UNITS / f"{SERVICE}.d" / "cache-dir.conf", _CACHE_DIR.format(self.cache_dir))
        yield target.write(UNITS / SERVICE, shipped(SERVICE).replace(SHIPPED_PROGRAM, str(self.program)))
        yield target.write(UNITS / "shardcache.socket", shipped("shardcache.socket"))
        if self.program != _LINK:
            yield target.link(_LINK, self.program)
        yield from target.enable(SERVICE)
