"""A host with a daemon."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from support.cluster.network import Host
from support.cluster.store import Dataset, Store, sha256
from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S


class Node:
    """A host with a daemon; a context manager that has it ready on entering and kills it on leaving.

    Attributes:
        daemon: reads from the store, through a tier where there is one.
    """

    def __init__(self, host: Host, root: Path, store: Store, *flags: str, tier: tuple[str, int] | None = None) -> None:
        """Prepare a daemon with more `flags`. `tier`: host and port where it asks for parts first."""
        root.mkdir()
        self.host = host  # its network
        self.root = root  # folder of everything that the node has
        config = root / "shardcache.toml"
        lines = ["[[origin]]", 'match = "s3://"']
        if tier is not None:
            lines.append(f'tier = "{tier[0]}:{tier[1]}"')
        config.write_text("\n".join(lines) + "\n")
        env = {**store.env(), "NETWORK": str(host.path)}  # for a zygote, which is in another network
        self.daemon = Daemon(root, "--config", str(config), "--scrub-rate", "0", *flags, env=env)

    def __enter__(self) -> Self:
        with self.host.entered():
            self.daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.kill()

    def __repr__(self) -> str:
        return f"<Node {self.host.address}>"

    def warm(self, urls: Sequence[str]) -> Ran:
        return shardcache("warm", *urls, socket=self.daemon.socket)

    def ask(
        self, host: str, port: int, target: str, headers: Mapping[str, str], tls: ssl.SSLContext | None = None
    ) -> tuple[int, bytes]:
        """GET a path and query from a server; return the status and the body."""
        with self.host.entered():
            if tls is None:
                connection = http.client.HTTPConnection(host, port, timeout=GUARD_S)
            else:
                connection = http.client.HTTPSConnection(host, port, timeout=GUARD_S, context=tls)
            try:
                connection.request("GET", target, headers=dict(headers))
                answer = connection.getresponse()
                return answer.status, answer.read()
            finally:
                connection.close()

    def check(self, ran: Ran, dataset: Dataset) -> None:
        """Raise AssertionError unless a fetch has gone well and every shard is cached, byte for byte."""
        assert ran.code == 0, f"{self}: {ran.out}{ran.err}\n{self.daemon.tail()}"
        assert not dataset.checksums - self.checksums(), self

    def checksums(self) -> set[str]:
        """Return the SHA-256 of the file of each cached shard."""
        files = (self.daemon.cache_dir / "shards").rglob("*.tar")
        return {sha256(path) for path in files}


def empty(nodes: Iterable[Node]) -> None:
    for node in nodes:
        answer = json.loads(node.daemon.request("POST", "/v1/evict", {"urls": ["s3://**"]}))
        assert node.daemon.shards() == [], answer
