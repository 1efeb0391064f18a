"""The tier of a cluster on the addresses of one machine's loopback: a real nginx for each node."""

import json
import os
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from shardcache.cluster.nginx_conf import render
from shardcache.cluster.node_list import Node, parse
from shardcache.cluster.tier_config import Tier, Tls, Upstream
from support.cluster.tier import Nginx, why_no_tier
from support.lifetime import Lifetime
from support.network.http_requests import Answer, answered
from support.network.ports import free_port
from support.programs.cli import shardcache
from support.programs.daemon import UnixConnection
from support.programs.guard import GUARD_S

needs_nginx = pytest.mark.skipif(why_no_tier() is not None, reason=str(why_no_tier()))


class TierNodes(Lifetime):
    """The nginx of every node, until the end of a `with` block.

    Attributes:
        tier: the configuration.
        nginx: that of each node which was started, by the node's name.
        folder: of the nodes' files.
    """

    def __init__(
        self, stores: Sequence[str], count: int = 3, *, tls: Tls | None = None, **options: Any
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="shardcache-tier-")
        self.folder = Path(self._temporary.name)
        self.tier = Tier(
            nodes=parse(
                ",".join(f"node{number}=127.0.0.{number + 1}" for number in range(1, count + 1))
            ),
            stores=tuple(map(Upstream.parse, stores)),
            owner_port=free_port(),
            cache_dir=str(self.folder / "{node}" / "cache"),
            run_dir=str(self.folder / "{node}" / "run"),
            min_free_bytes=1,
            user="root" if os.geteuid() == 0 else None,
            workers=1,
            tls=tls,
            **options,
        )
        self.nginx: dict[str, Nginx] = {}

    def begin(self) -> None:
        self.parts.enter_context(self._temporary)
        for node in self.tier.nodes:
            self.start(node)

    def start(self, node: Node, config: Path | None = None) -> None:
        """Start a node's nginx, and wait until it answers.

        Args:
            config: file to use as it is; None for the rendered one.
        """
        if config is None:
            config = self.folder / f"{node.name}.conf"
            config.write_text(render(self.tier, node))
        for path in (self.tier.cache_folder(node), self.tier.run_folder(node)):
            path.mkdir(parents=True, exist_ok=True)
        nginx = Nginx(None, config, [self.tier.front(node)])
        self.nginx[node.name] = self.parts.enter_context(nginx)

    def front(self, node: Node) -> str:
        """Return the path of a node's front."""
        return str(self.tier.front(node))

    def get(
        self,
        server: str,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None = None,
        source: str = "",
    ) -> Answer:
        """Request a url of the store from a front, by its path, or an owner, by HOST:PORT.

        An owner is asked from the address `source` of the loopback.
        """
        host, _, port = server.rpartition(":")
        connection: HTTPConnection
        if server.startswith("/"):
            connection = UnixConnection(Path(server))
        elif tls is not None:
            connection = HTTPSConnection(
                host, int(port), timeout=GUARD_S, source_address=(source, 0), context=tls
            )
        else:
            connection = HTTPConnection(
                host, int(port), timeout=GUARD_S, source_address=(source, 0)
            )
        parts = urlsplit(url, allow_fragments=False)
        return answered(
            connection, f"{parts.path}?{parts.query}", {"Host": parts.netloc, **headers}
        )

    def log(self, node: Node) -> list[dict[str, Any]]:
        path = self.tier.cache_folder(node) / "access.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def cached(self, node: Node) -> list[Path]:
        return [
            path for path in (self.tier.cache_folder(node) / "parts").rglob("*") if path.is_file()
        ]


def tier_findings(
    folder: Path, front: str, tables: str = "", check: str = "tier.reach"
) -> list[dict[str, str]]:
    config = folder / "shardcache.toml"
    config.write_text(f'[[origin]]\nmatch = "s3://"\ntier = "{front}"\n{tables}')
    ran = shardcache(
        "doctor",
        "--quick",
        "--config",
        config,
        "--cache-dir",
        folder / "daemon",
        "--json",
        "http://127.0.0.1:9",
    )
    return [dict(finding) for finding in ran.json["findings"] if finding["check"] == check]
