"""nginx on a host of its own, over a configuration that keeps it in the foreground."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from support.cluster.network import Host
from support.programs.daemon import eventually
from support.programs.processes import children, wait_until_ended

# Debian has it in a folder that is not on the path of users other than root.
PROGRAM = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


class Nginx:
    """A context manager that has it listening on entering, and kills it on leaving."""

    def __init__(self, host: Host, config: Path, addresses: Iterable[tuple[str, int]]) -> None:
        """`addresses` are all those at which it listens."""
        self._host = host
        self._addresses = tuple(addresses)
        self._process: subprocess.Popen[bytes] | None = None
        self.config = config  # its configuration
        self.log = config.parent / "nginx.log"  # where its output goes

    @property
    def pid(self) -> int:
        """Process id of its master while it runs."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and return when it listens. Raises RuntimeError with its output when it does not."""
        assert PROGRAM is not None
        command = [PROGRAM, "-e", "stderr", "-c", str(self.config)]
        with self.log.open("ab") as log, self._host.entered():
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        try:
            eventually(self._listens)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it and its workers with SIGKILL, if it runs."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGSTOP)  # or it would replace the workers
        workers = children(process.pid)
        for pid in (process.pid, *workers):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        for pid in workers:
            wait_until_ended(pid)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop its workers: the kernel takes connections for them, and nothing answers."""
        workers = children(self.pid)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)

    def reload(self) -> None:
        """Let it read its configuration again, and return when it goes by that."""
        assert self._process is not None
        before = set(children(self._process.pid))
        self._process.send_signal(signal.SIGHUP)
        eventually(lambda: self._has_new_workers(before))

    def _has_new_workers(self, before: set[int]) -> bool:
        assert self._process is not None
        return before.isdisjoint(now := children(self._process.pid)) and len(now) >= len(before)

    def _listens(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"nginx ended at once:\n{self.log.read_text()}")
        with self._host.entered():
            return all(map(_accepts, self._addresses))


def _accepts(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0
