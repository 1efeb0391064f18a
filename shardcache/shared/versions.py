"""Versions of the protocol between daemon and client, and the version on which both agree.

Daemon and client may be different releases of shardcache. Each release speaks a range of protocol
versions. The client's first message, `hello`, states the client's range.
"""

from dataclasses import dataclass

from shardcache.shared.exceptions import VersionMismatchError
from shardcache.shared.protocol import Json, take

PROTOCOL_VERSION = 4
"""The newest protocol version that this release speaks."""

OLDEST_PROTOCOL_VERSION = 4
"""The oldest protocol version that this release speaks."""


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The range of protocol versions that one side speaks, including both ends."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"protocol {self.newest}"
        return f"protocols {self.oldest} to {self.newest}"


SPOKEN = ProtocolRange(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)
"""The protocol versions that this release speaks."""


@dataclass(frozen=True, slots=True)
class Release:
    """A shardcache version and the protocol versions that it speaks."""

    version: str
    spoken: ProtocolRange

    def __str__(self) -> str:
        return f"shardcache {self.version}, which speaks {self.spoken}"

    @classmethod
    def of(cls, hello: Json) -> "Release":
        """Return the client's release, as its `hello` states it. Raises ProtocolError.

        A client that does not state its `oldest_protocol` speaks only its newest protocol.
        """
        newest = take(hello, "protocol", int)
        oldest = hello.get("oldest_protocol")
        if not isinstance(oldest, int):
            oldest = newest
        return cls(str(hello.get("client_version")), ProtocolRange(oldest, newest))


def agree(*, daemon: Release, client: Release) -> int:
    """Return the newest protocol version that both sides speak.

    Raises VersionMismatchError if there is none. The error names both releases, and the remedy
    which of them to upgrade.
    """
    newest_common = min(daemon.spoken.newest, client.spoken.newest)
    oldest_common = max(daemon.spoken.oldest, client.spoken.oldest)
    if oldest_common <= newest_common:
        return newest_common

    # The ranges do not overlap, so one side is older: it speaks only versions before the other's.
    is_client_older = client.spoken.newest < daemon.spoken.oldest
    if is_client_older:
        place = "in the training image"
        newer = daemon
    else:
        place = "on the node"
        newer = client
    remedy = (
        f"install shardcache {newer.version} {place}, or any release that speaks {newer.spoken}"
    )
    raise VersionMismatchError(f"the daemon is {daemon}, the client {client}", remedy=remedy)
