"""Object stores behind the tier: the only hosts that it connects to."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from shardcache.errors import ConfigError

_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Upstream:
    """One object store or web server.

    Attributes:
        scheme: "http" or "https".
        host: its host, in lower case.
        port: None for the scheme's own.
    """

    scheme: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, url: str) -> Upstream:
        """Parse the url of an endpoint, such as https://s3.eu-central-1.amazonaws.com. Raises ConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        host = (parts.hostname or "").rstrip(".")
        is_host = _HOST.fullmatch(host) or ":" in host
        if parts.scheme not in _PORTS or not is_host or port == 0 or parts.path.strip("/") or parts.query:
            raise ConfigError(
                "the url of a store has a scheme, a host and perhaps a port, and nothing else",
                url=url,
                remedy="write its endpoint, such as https://s3.eu-central-1.amazonaws.com; for a bucket, its region's",
            )
        store = cls(parts.scheme, host, None if port == _PORTS[parts.scheme] else port)
        if store.scheme == "https" and store.is_address:
            raise ConfigError(
                "nginx can verify the certificate of a name, not that of an address",
                url=url,
                remedy="name the store, here and in the daemons' endpoint; or use http",
            )
        return store

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """Host header of requests to it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"

    @property
    def server(self) -> str:
        """HOST:PORT to connect to."""
        return self.authority if self.port is not None else f"{self.authority}:{_PORTS[self.scheme]}"

    @property
    def is_address(self) -> bool:
        """True if the host is an IP address."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True
