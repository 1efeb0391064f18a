"""Names that lead where `LEADING` says; Python imports this from `PYTHONPATH` at its start."""

import json
import os
import socket
from typing import Any

VARIABLE = "LEADING"

_real = socket.getaddrinfo


def getaddrinfo(host: str | bytes | None, port: Any, *args: Any, **options: Any) -> list[Any]:
    """Do as `socket.getaddrinfo`, but lead names in `LEADING` to [address, port or None]."""
    name = host.decode() if isinstance(host, bytes) else host
    places = json.loads(os.environ.get(VARIABLE, "{}")).get(name)
    if places is None:
        return _real(host, port, *args, **options)
    return [
        found for address, at in places for found in _real(address, at or port, *args, **options)
    ]


if __name__ == "sitecustomize":
    socket.getaddrinfo = getaddrinfo
