"""The systemd service of this node's part of the cluster's tier, and the daemon's use of it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.cli.cluster.options import tier_of
from shardcache.cli.cluster.run import host_name, run
from shardcache.cli.installation.target import (
    CONFIG,
    SHIPPED_PROGRAM,
    UNITS,
    USER,
    Done,
    Target,
    check_visible,
    shipped,
)
from shardcache.cluster import nginx_process
from shardcache.cluster.tier import CACHE_DIR
from shardcache.errors import ConfigError

SERVICE = "shardcache-tier.service"
FOLDER = Path("/etc/shardcache/tier")
NODES = FOLDER / "nodes"
KEY = "node.key"
_CERTIFICATES = ("ca.pem", "node.pem", KEY)
# Arguments that systemd splits and takes as they are.
_PLAIN = re.compile(r"[\w/.:,=@+{}\[\]-]+")
_ENVIRONMENT = """\
# Written by `shardcache install tier`, whose other arguments these are.
TIER_OPTIONS={}
"""
_OWN_DISK = """\
[Unit]
RequiresMountsFor={0}
[Service]
ReadWritePaths={0}
"""
_STORES = "s3://"
_TABLE = f"""\
[[origin]]
match = "{_STORES}"
tier = "{{}}"
"""


@dataclass(frozen=True, slots=True)
class TierService:
    """The service as docs/cluster.md describes it. Raises ConfigError for options that it could not use.

    Attributes:
        target: the node, or its image.
        program: the `shardcache` that the service starts.
        nodes: text of the list of nodes; None to keep the installed one.
        certificates: text of the files of the node's certificate, by name; empty to keep what is installed.
        arguments: arguments of `shardcache cluster run`.
        front: HOST:PORT at which it serves the daemon, according to them.
        own_disk: their folder for the cached parts; None if it is that of the unit.
    """

    target: Target
    program: Path
    nodes: str | None
    certificates: Mapping[str, str]
    arguments: Sequence[str]
    front: str
    own_disk: Path | None

    def __post_init__(self) -> None:
        for path in filter(None, (self.program, self.own_disk)):
            check_visible(path)
        if odd := next((each for each in self.arguments if not _PLAIN.fullmatch(each)), None):
            raise ConfigError(f"{odd!r} cannot be written into a unit", remedy="write it without spaces and signs")

    def install(self) -> Iterator[Done]:
        """Take the steps, and yield each when it is done. Raises as `Target`."""
        target = self.target
        yield from target.users()
        if self.nodes is not None:
            yield target.write(NODES, self.nodes)
        for name, text in self.certificates.items():
            yield target.write(FOLDER / name, text, 0o640 if name == KEY else 0o644, group=USER)
        yield target.write(FOLDER / "environment", _ENVIRONMENT.format(" ".join(self.arguments)))
        if self.own_disk is not None:
            yield target.folder(self.own_disk, USER, 0o700)
            yield target.write(UNITS / f"{SERVICE}.d" / "cache-dir.conf", _OWN_DISK.format(self.own_disk))
        yield target.write(UNITS / SERVICE, shipped(SERVICE).replace(SHIPPED_PROGRAM, str(self.program)))
        yield self._config()
        yield from target.enable(SERVICE)

    def _config(self) -> Done:
        """Have the daemon use the tier, unless the operator has changed its config."""
        plain = shipped("shardcache.toml")
        is_ours = self.target.read(CONFIG) in (None, plain)
        return self.target.write(CONFIG, f"{plain}\n{_TABLE.format(self.front)}", 0o640, group=USER, replace=is_ours)

    def missing_from_config(self) -> str | None:
        """Return what the daemon's config lacks to use the tier, as lines of TOML with comments; None if nothing."""
        text = self.target.read(CONFIG)
        tables = _origins(text or "")
        if text is None or any(table.get("tier") == self.front for table in tables):
            return None
        matches = [table["match"] for table in tables]
        own = "" if _STORES in matches else _TABLE.format(self.front)
        return own + "".join(f'# in the [[origin]] table of {match}: tier = "{self.front}"\n' for match in matches)


def service_of(
    target: Target, program: Path, nodes: Path | None, certificates: Path | None, arguments: Sequence[str]
) -> TierService:
    """Return the service for given files and arguments of `shardcache cluster run`.

    Raises ConfigError for files that are missing and options that nginx could not use, before anything is changed, and
    UsageError for arguments that are none.
    """
    nginx_process.program(target.root)
    listed = nodes or target.at(NODES)
    text = _read(listed, "write the list of all nodes, and name it with --nodes FILE")
    given = run.make_context("shardcache cluster run", ["--nodes", str(listed), *arguments]).params
    front, own_disk, node = given["front"], Path(given["cache_dir"]), given.pop("node") or host_name()
    given.pop("as_json")
    tier = tier_of(**given)
    if not target.is_image:
        tier.node(node)
    if tier.tls is not None and certificates is None and not target.at(FOLDER / KEY).exists():
        raise ConfigError(
            f"this node has no certificate in {FOLDER}",
            remedy="create those of all nodes by `shardcache cluster certificates`, and name this node's folder with "
            "--certificates FOLDER; or --plain, in a network that you trust",
        )
    return TierService(
        target=target,
        program=program,
        nodes=None if nodes is None else text,
        certificates={} if certificates is None else _certificates(certificates),
        arguments=arguments,
        front=front,
        own_disk=None if own_disk == Path(CACHE_DIR) else own_disk,
    )


def _read(path: Path, remedy: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exn:
        raise ConfigError(f"cannot read {path}: {getattr(exn, 'strerror', exn)}", remedy=remedy) from None


def _certificates(folder: Path) -> Mapping[str, str]:
    remedy = "name this node's folder of those that `shardcache cluster certificates --out` wrote"
    return {name: _read(folder / name, remedy) for name in _CERTIFICATES}


def _origins(text: str) -> list[dict[str, Any]]:
    try:
        return [table for table in tomllib.loads(text).get("origin", []) if "match" in table]
    except tomllib.TOMLDecodeError:  # the daemon says where
        return []
