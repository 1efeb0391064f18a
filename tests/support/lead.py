"""Names that lead where a test wants."""

from __future__ import annotations

import socket
from typing import Any

import pytest


def lead(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str, port: int | None = None) -> None:
    """Let a name lead to these addresses, in this order; and to another port than is asked for, where one is given."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str | bytes | None, wanted_port: Any, *args: Any, **options: Any) -> list[Any]:
        if host not in (name, name.encode()):
            return real(host, wanted_port, *args, **options)
        at = port or wanted_port
        return [found for address in addresses for found in real(address, at, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
