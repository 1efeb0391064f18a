"""The cluster's tier: an nginx on each node, as `shardcache cluster render` configures it."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import trustme

from support.cli import shardcache
from support.cluster.nginx import Nginx
from support.cluster.node import Node
from support.cluster.store import Store

FRONT = ("127.0.0.1", 9080)
OWNER_PORT = 9081
PEER_NAME = "shardcache-tier"


class Tier:
    """A context manager that has no nginx on entering, and kills those that run on leaving.

    Attributes:
        root: folder of the nodes' folders.
    """

    def __init__(self, root: Path, store: Store, *, stall_timeout_s: float, tls: bool = True) -> None:
        """Prepare one whose nodes encrypt what they send to each other, unless `tls` is False."""
        self.root = root
        self._options = ["--store", store.endpoint_url, "--stall-timeout-s", str(stall_timeout_s)]
        self._nginx: dict[Node, Nginx] = {}
        self._tls: ssl.SSLContext | None = None
        if tls:
            self._certify(root)
        else:
            self._options += ["--plain"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            self._render(nodes)
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
        return node.ask(node.host.address, OWNER_PORT, target, headers, self._tls)

    def check_logs(self) -> None:
        """Raise AssertionError if a log of a node holds a signature, or nginx has logged no request."""
        for node in self._nginx:
            cache, _ = _folders(node.root)
            logs = {path.name: path.read_text() for folder in (cache, node.root) for path in folder.glob("*.log")}
            assert '"GET"' in logs["access.log"], node
            assert not [name for name, log in logs.items() if "signature" in log.lower()], node

    def _render(self, nodes: Sequence[Node]) -> None:
        names = ",".join(f"{node.root.name}={node.host.address}" for node in nodes)
        cache, run = _folders(self.root / "{node}")
        done = shardcache(
            *("cluster", "render", "--nodes", names, "--out", str(self.root), *self._options),
            *("--cache-dir", str(cache), "--run-dir", str(run), "--min-free", "1MiB", "--user", "root"),
            *("--workers", "2"),
        )
        assert done.code == 0, done.err

    def _certify(self, folder: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert(PEER_NAME)
        files = {name: folder / f"{name}.pem" for name in ("ca", "certificate", "key")}
        authority.cert_pem.write_to_path(files["ca"])
        certificate.cert_chain_pems[0].write_to_path(files["certificate"])
        certificate.private_key_pem.write_to_path(files["key"])
        for name, file in files.items():
            self._options += [f"--{name}", str(file)]
        self._tls = ssl.create_default_context(cafile=files["ca"])
        self._tls.check_hostname = False
        self._tls.load_cert_chain(files["certificate"], files["key"])


def _folders(root: Path) -> tuple[Path, Path]:
    return root / "tier", root / "run"
