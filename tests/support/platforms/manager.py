"""A service manager, as far as a daemon can tell: it binds sockets, hands them over, and listens to what it is told."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from support.programs.guard import GUARD_S

# The process id that the sockets are for is known only to who becomes that process. They are moved out of each other's
# way first: one of them may lie where another belongs.
_BECOME = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, 100) for fd in sys.argv[1].split(",")]
for number, fd in enumerate(fds, 3):
    os.dup2(fd, number)
os.closerange(3 + len(fds), 100)
given = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join("x" * len(fds))}
os.execve(sys.argv[2], sys.argv[2:], os.environ | given)
"""


class ServiceManager:
    """A context manager whose `spawn` is what `Daemon` takes to start its process by.

    Args:
        address: of its own socket: a path, or "@" and an abstract name.
        watchdog_s: silence after which it would end the daemon; it leaves that to the test.
        sockets: to be handed over.
    """

    def __init__(
        self, address: Path | str, *, watchdog_s: float | None = None, sockets: Sequence[socket.socket] = ()
    ) -> None:
        self.address = str(address)
        self.messages: list[dict[str, str]] = []
        self._watchdog_s = watchdog_s
        self._sockets = sockets
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        self._ear = self._exit.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._ear.bind(self.address.replace("@", "\0", 1))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def spawn(self, args: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Run `python -m shardcache` with arguments, as a manager would: its `spawn` for `Daemon`."""
        told = {"NOTIFY_SOCKET": self.address}
        if self._watchdog_s is not None:
            told["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        with log.open("ab") as file:
            command = (sys.executable, "-m", "shardcache", *args)
            return handing_over(self._sockets, command, env={**env, **told}, stdout=file, stderr=file)

    def hear(self, limit_s: float = GUARD_S) -> dict[str, str]:
        """Return the fields of the next message. Raises TimeoutError when none comes within the limit."""
        self._ear.settimeout(limit_s)
        lines = self._ear.recv(4096).decode().splitlines()
        self.messages.append(dict(line.split("=", 1) for line in lines))
        return self.messages[-1]

    def hear_of(self, field: str) -> str:
        """Return what the next message says that has a field; others are passed over."""
        while field not in (message := self.hear()):
            pass
        return message[field]

    def hear_nothing_for(self, silence_s: float) -> None:
        try:
            while True:
                self.hear(silence_s)
        except TimeoutError:
            return


def bound(path: Path, mode: int = 0o660) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(os.fspath(path))
    path.chmod(mode)
    sock.listen(64)
    return sock


def handing_over(
    sockets: Sequence[socket.socket], command: Sequence[str], *, env: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command that finds sockets as its descriptors 3, 4 …; further options are those of Popen."""
    fds = [sock.fileno() for sock in sockets]
    become = (sys.executable, "-ISc", _BECOME, ",".join(map(str, fds)), *command)
    return subprocess.Popen(become if fds else command, env=env, pass_fds=fds, **options)
