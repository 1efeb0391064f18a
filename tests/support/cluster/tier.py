"""The cluster's tier: an nginx on each node, as `shardcache cluster render` configures it."""

import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Self

from support.cluster.network import Host
from support.cluster.node import Node, Store
from support.programs.cli import shardcache
from support.programs.daemon import eventually
from support.programs.processes import children, kill_tree, logged

# Debian has it in a folder that is not on the path of users other than root.
NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


Address = tuple[str, int] | Path
"""Listening address of nginx: host and port, or a Unix socket."""


def why_no_tier() -> str | None:
    """Return why there can be no tier here, None where there can be one."""
    if NGINX is None:
        return "no nginx: apt-get install nginx-light libnginx-mod-http-lua"
    built = subprocess.run([NGINX, "-V"], capture_output=True, text=True, check=False).stderr
    prefix = re.search(r"--prefix=(\S+)", built)
    if prefix and Path(prefix[1], "modules", "ngx_http_lua_module.so").exists():
        return None
    return "nginx has no Lua: apt-get install libnginx-mod-http-lua"


class Nginx:
    """A context manager that has it listening on entering, and kills it on leaving."""

    def __init__(self, host: Host | None, config: Path, addresses: Iterable[Address]) -> None:
        """`addresses` are those at which it listens, on its host or on this machine."""
        self._entered = host.entered if host else nullcontext
        self._addresses = tuple(addresses)
        self._process: subprocess.Popen[bytes] | None = None
        self.config = config  # its configuration
        self.log = config.with_suffix(".log")  # where its output goes

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and return when it listens. Raises RuntimeError with its output if it fails."""
        assert NGINX is not None
        for address in self._addresses:
            if isinstance(address, Path):
                address.unlink(missing_ok=True)  # of one that was killed
        command = [NGINX, "-e", "stderr", "-c", str(self.config)]
        with self._entered():
            self._process = logged(command, self.log, process_group=0)
        try:
            eventually(self._listens)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it and its workers with SIGKILL, if it runs."""
        process = self._process
        self._process = None
        if process is None or process.poll() is not None:
            return
        kill_tree(process.pid)
        process.wait()

    def reload(self) -> None:
        """Let it read its configuration again, and return when it goes by that.

        Its previous workers may still finish their transfers.
        """
        assert self._process is not None
        before = set(self.workers())
        self._process.send_signal(signal.SIGHUP)
        eventually(lambda: self._has_new_workers(before))

    def workers(self) -> list[int]:
        """Return the worker processes that accept connections."""
        return [pid for pid in children(self.pid) if _title(pid) == "nginx: worker process"]

    def _has_new_workers(self, before: set[int]) -> bool:
        now = self.workers()
        return before.isdisjoint(now) and len(now) >= len(before)

    def _listens(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"nginx ended at once:\n{self.log.read_text()}")
        # The kernel takes connections before the workers are started.
        if not self.workers():
            return False
        with self._entered():
            return all(map(_accepts, self._addresses))


def _title(pid: int) -> str:
    """Return how a process calls itself; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text().strip("\0 ")
    return ""


def _accepts(address: Address) -> bool:
    if isinstance(address, Path):
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(address)) == 0
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


OWNER_PORT = 9081


class Tier(AbstractContextManager["Tier"]):
    """A context manager that has no nginx on entering, and kills those that run on leaving."""

    def __init__(
        self, root: Path, store: Store, *, stall_timeout_s: float, tls: bool = True
    ) -> None:
        """Prepare one whose nodes encrypt what they send to each other, unless `tls` is False."""
        self.root = root  # folder of the nodes' folders
        self._options = ["--store", store.endpoint_url, "--stall-timeout-s", str(stall_timeout_s)]
        self._nginx: dict[Node, Nginx] = {}
        self._is_plain = not tls

    def __exit__(self, *_: object) -> None:
        self.form([])

    def __getitem__(self, node: Node) -> Nginx:
        return self._nginx[node]

    def form(self, nodes: Sequence[Node]) -> None:
        """Let the tier consist of these nodes: start nginx on new ones, end it on others.

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
                addresses: list[Address] = [node.front, (node.host.address, OWNER_PORT)]
                self._nginx[node] = Nginx(node.host, node.root / "nginx.conf", addresses)
                self._nginx[node].start()

    def files(self, node: Node) -> list[Path]:
        """Return the files of the parts that a node has cached for the tier."""
        cache, _ = _folders(node.root)
        return [path for path in (cache / "parts").rglob("*") if path.is_file()]

    def _configure(self, nodes: Sequence[Node]) -> None:
        names = ",".join(f"{node.root.name}={node.host.address}" for node in nodes)
        cache, run = _folders(self.root / "{node}")
        if self._is_plain:
            between = ["--plain"]
        else:
            _run("certificates", "--nodes", names, "--out", self.root)
            folder = self.root / "{node}"
            between = [
                "--ca",
                f"{folder}/ca.pem",
                "--certificate",
                f"{folder}/node.pem",
                "--key",
                f"{folder}/node.key",
            ]
        where = (
            "--cache-dir",
            cache,
            "--run-dir",
            run,
            "--min-free",
            "1MiB",
            "--user",
            "root",
            "--workers",
            "2",
        )
        _run("render", "--nodes", names, "--out", self.root, *where, *between, *self._options)


def _run(*args: str | Path) -> None:
    done = shardcache("cluster", *args)
    assert done.code == 0, done.err


def _folders(root: Path) -> tuple[Path, Path]:
    return root / "tier", root / "run"
