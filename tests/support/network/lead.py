"""Names that lead where a test wants, and a DNS server that gives all this machine."""

import json
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from support.network.leading import sitecustomize

_FOLDER = Path(sitecustomize.__file__).parent


def lead(
    monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str, port: int | None = None
) -> None:
    """Let a name lead to these addresses, in this order, and to another port if given.

    That holds for this process and for each Python that it starts from now on.
    """
    table = json.loads(os.environ.get(sitecustomize.VARIABLE, "{}"))
    table[name] = [(address, port) for address in addresses]
    monkeypatch.setenv(sitecustomize.VARIABLE, json.dumps(table))
    monkeypatch.setenv("PYTHONPATH", str(_FOLDER), prepend=os.pathsep)
    monkeypatch.setattr(socket, "getaddrinfo", sitecustomize.getaddrinfo)


SILENT = "127.0.0.2"


@contextmanager
def silent_address(port: int) -> Iterator[None]:
    """Listen at a port of `SILENT` with a full queue, so that the kernel drops the rest."""
    with ExitStack() as sockets:
        sockets.enter_context(socket.create_server((SILENT, port), backlog=0))
        with suppress(TimeoutError):
            while True:
                sockets.enter_context(socket.create_connection((SILENT, port), timeout=0.2))
        yield


_HEAD = struct.Struct("!6H")
_ANSWERED = 0x8180
_TYPE_A = 1
_TYPE_AAAA = 28


class NameServer(socketserver.ThreadingUDPServer):
    """Answers 127.0.0.1; a context manager. `ipv6`: further addresses that it answers."""

    daemon_threads = True

    def __init__(self, *ipv6: str) -> None:
        super().__init__(("127.0.0.1", 0), _Question)
        self.address = f"127.0.0.1:{self.server_address[1]}"  # HOST:PORT of the server
        self.asked: set[str] = set()  # every name that it was asked for
        self.records = {
            _TYPE_A: [_record(_TYPE_A, socket.inet_aton("127.0.0.1"))],
            _TYPE_AAAA: [
                _record(_TYPE_AAAA, socket.inet_pton(socket.AF_INET6, address)) for address in ipv6
            ],
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Question(socketserver.BaseRequestHandler):
    server: NameServer

    def handle(self) -> None:
        packet, answering = self.request
        number, *_ = _HEAD.unpack_from(packet)
        end = packet.index(b"\0", _HEAD.size) + 1
        kind, _ = struct.unpack_from("!2H", packet, end)
        self.server.asked.add(_name(packet[_HEAD.size : end]))
        records = self.server.records.get(kind, [])
        head = _HEAD.pack(number, _ANSWERED, 1, len(records), 0, 0)
        answering.sendto(
            head + packet[_HEAD.size : end + 4] + b"".join(records), self.client_address
        )


def _record(kind: int, address: bytes) -> bytes:
    """Return a pointer to the question's name, type, class, seconds to live and address."""
    return struct.pack("!3HIH", 0xC00C, kind, 1, 60, len(address)) + address


def _name(labels: bytes) -> str:
    names = []
    at = 0
    while length := labels[at]:
        names.append(labels[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(names)
