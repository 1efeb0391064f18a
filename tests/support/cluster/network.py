"""A network of hosts on this machine: namespaces joined by a bridge, as many as there are hosts.

They have no names, neither here nor in /run: this process has them open, and the kernel removes
them with the last process that uses them, however that ends. So any number of networks can exist at
a time, all with the same addresses.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.lifetime import Lifetime

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.77.0"
_HERE = Path("/proc/thread-self/ns/net")
_LIBC = ctypes.CDLL(None, use_errno=True)
_HOME = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)


def why_not() -> str | None:
    """Return why no network can be made here, None where one can."""
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"no {missing[0]}: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces take root"
    try:
        with Network() as network:
            network.add(1).limit(800)
    except OSError as exn:
        return f"no network namespaces: {exn}"
    except subprocess.CalledProcessError as exn:
        return f"no network namespaces: {exn.stderr.decode().strip()}"
    return None


def enter(path: Path) -> None:
    """Use another network from now on, in this thread and the processes that it starts."""
    with path.open("rb") as file:
        _call(_LIBC.setns, file.fileno(), _CLONE_NEWNET)


@contextmanager
def at_home() -> Iterator[None]:
    """Let this thread use the network in which this process began, whichever it has entered."""
    if os.path.samestat(os.fstat(_HOME), _HERE.stat()):  # entering takes root
        yield
        return
    with _returning():
        _call(_LIBC.setns, _HOME, _CLONE_NEWNET)
        yield


class Namespace:
    """A network namespace; it exists until `close`, and while a process is in it."""

    def __init__(self) -> None:
        """Raises OSError where this process may not make one."""
        with _returning():
            _call(_LIBC.unshare, _CLONE_NEWNET)
            self._fd = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)
        # Other processes can enter it by this path.
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        self.run("ip", "link", "set", "lo", "up")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread, with its sockets and new processes, use this network."""
        with _returning():
            _call(_LIBC.setns, self._fd, _CLONE_NEWNET)
            yield

    def run(self, *command: str) -> None:
        """Run a command here. Raises subprocess.CalledProcessError with its output."""
        with self.entered():
            subprocess.run(command, check=True, capture_output=True)

    def close(self) -> None:
        """Give it up; nothing more can enter it by `path`."""
        os.close(self._fd)


class Host(Namespace):
    def __init__(self, switch: Namespace, number: int) -> None:
        super().__init__()
        self.address = f"{_SUBNET}.{number}"  # its IPv4 address
        self._switch = switch
        self._port = f"port{number}"
        switch.run(
            "ip",
            "link",
            "add",
            self._port,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(self.path),
        )
        switch.run("ip", "link", "set", self._port, "master", "bridge", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def limit(self, mbit_per_s: int) -> None:
        shape = ("tbf", "rate", f"{mbit_per_s}mbit", "burst", "1mb", "latency", "200ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", *shape)

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """Let every packet from it and to it be lost, without a word to either side."""
        self._switch.run("ip", "link", "set", self._port, "nomaster")
        try:
            yield
        finally:
            self._switch.run("ip", "link", "set", self._port, "master", "bridge")

    def sent_bytes(self) -> int:
        return self._counters()[8]

    def received_bytes(self) -> int:
        """Return the bytes that have come in by its interface, headers included."""
        return self._counters()[0]

    def _counters(self) -> list[int]:
        with self.entered():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(
            list(map(int, line.split()[1:])) for line in lines if line.split()[0] == "eth0:"
        )


class Network(Lifetime):
    """A context manager of a bridge and the hosts added to it, which end on leaving."""

    def begin(self) -> None:
        self._switch = Namespace()
        self.parts.callback(self._switch.close)
        self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self._switch.run("ip", "link", "set", "bridge", "up")

    def add(self, number: int) -> Host:
        host = Host(self._switch, number)
        self.parts.callback(host.close)
        return host


@contextmanager
def _returning() -> Iterator[None]:
    home = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _call(_LIBC.setns, home, _CLONE_NEWNET)
        os.close(home)


def _call(function: "ctypes._NamedFuncPointer", *args: int) -> None:
    if function(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
