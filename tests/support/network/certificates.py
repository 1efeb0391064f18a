"""TLS certificates for local servers, signed by an authority made for the occasion."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

_DAY = timedelta(days=1)


class Authority:
    """An authority and what it has signed.

    Attributes:
        ca_file: its own certificate, for clients to trust.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.ca_file = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(self.ca_file)

    def server_file(self) -> Path:
        """Write a private key and certificate for localhost in one file; return its path."""
        path = self._folder / "server.pem"
        self._authority.issue_cert(
            "localhost", "127.0.0.1"
        ).private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def server(self, host: str = "127.0.0.1", *, lifetime: timedelta = _DAY) -> ssl.SSLContext:
        """Return a server's TLS context for that name; a negative lifetime has passed."""
        now = datetime.now(UTC)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(
            host, not_before=now - 3 * _DAY, not_after=now + lifetime
        ).configure_cert(context)
        return context
