"""The cluster's tier: an nginx on each node, as `shardcache cluster render` configures it."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from support.cluster.nginx import Nginx
from support.cluster.node import Node
from support.cluster.store import Store
from support.programs.cli import shardcache

FRONT = ("127.0.0.1", 9080)
OWNER_PORT = 9081


class Tier:
    """A context manager that has no nginx on entering, and kills those that run on leaving."""

    def __init__(self, root: Path, store: Store, *, stall_timeout_s: float, tls: bool = True) -> None:
        """Prepare one whose nodes encrypt what they send to each other, unless `tls` is False."""
        self.root = root  # folder of the nodes' folders
        self._options = ["--store", store.endpoint_url, "--stall-timeout-s", str(stall_timeout_s)]
        self._nginx: dict[Node, Nginx] = {}
        self._is_plain = not tls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.form([])

    def __getitem__(self, node: Node) -> Nginx:
        return self._nginx[node]

    def form(self, nodes: Sequence[Node]) -> None:
        """Let the tier consist of these nodes: start nginx on those that join, end it on those that leave.

        What a node has cached for the tier is gone when it leaves.
        """
        for node in self._nginx.keys() - nodes:
            self._nginx.pop(node).kill()
            for folder in _folders(node.root):
                shutil.rmtree(folder)
        if nodes:
            self._configure(nodes)
        for node in nodes:
            if node in self._nginx:
                self._nginx[node].reload()
            else:
                for folder in _folders(node.root):
                    folder.mkdir()
                addresses = [FRONT, (node.host.address, OWNER_PORT)]
                self._nginx[node] = Nginx(node.host, node.root / "nginx.conf", addresses)
                self._nginx[node].start()

    def files(self, node: Node) -> list[Path]:
        """Return the files of the parts that a node has cached for the tier."""
        cache, _ = _folders(node.root)
        return [path for path in (cache / "parts").rglob("*") if path.is_file()]

    def ask_front(self, node: Node, target: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """GET a path and query as a node's daemon does; return the status and the body."""
        return node.ask(*FRONT, target, headers)

    def ask_owner(self, node: Node, target: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """GET a path and query from a node, as other nodes do; return the status and the body."""
        return node.ask(node.host.address, OWNER_PORT, target, headers, self._tls(node))

    def _tls(self, node: Node) -> ssl.SSLContext | None:
        if self._is_plain:
            return None
        ca, certificate, key = _pem_files(node.root)
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = False
        context.load_cert_chain(certificate, key)
        return context

    def check_logs(self) -> None:
        """Raise AssertionError if a log of a node holds a signature, or nginx has logged no request."""
        for node in self._nginx:
            cache, _ = _folders(node.root)
            logs = {path.name: path.read_text() for folder in (cache, node.root) for path in folder.glob("*.log")}
            assert '"GET"' in logs["access.log"], node
            assert not [name for name, log in logs.items() if "signature" in log.lower()], node

    def _configure(self, nodes: Sequence[Node]) -> None:
        names = ",".join(f"{node.root.name}={node.host.address}" for node in nodes)
        cache, run = _folders(self.root / "{node}")
        if self._is_plain:
            between = ["--plain"]
        else:
            _run("certificates", "--nodes", names, "--out", self.root)
            ca, certificate, key = _pem_files(self.root / "{node}")
            between = ["--ca", str(ca), "--certificate", str(certificate), "--key", str(key)]
        where = ("--cache-dir", cache, "--run-dir", run, "--min-free", "1MiB", "--user", "root", "--workers", "2")
        _run("render", "--nodes", names, "--out", self.root, *where, *between, *self._options)


def _run(*args: str | Path) -> None:
    done = shardcache("cluster", *args)
    assert done.code == 0, done.err


def _pem_files(folder: Path) -> tuple[Path, Path, Path]:
    return folder / "ca.pem", folder / "node.pem", folder / "node.key"


def _folders(root: Path) -> tuple[Path, Path]:
    return root / "tier", root / "run"
