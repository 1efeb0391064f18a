"""A reader's request for one shard of its plan, and the daemon's grant of that request.

A lease is a reader's claim on a shard, from the request until the release. A grant is the daemon's
answer to a request: the path of the shard's file, which stays cached until the lease ends. The file
of an "arriving" grant has only its beginning so far; a "leased" shard is complete.
"""

from dataclasses import dataclass
from typing import TypeAlias

from shardcache.shared.protocol import Arriving, Json, Leased

Grant: TypeAlias = Arriving | Leased


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A request for one shard, and the daemon's grant of that request.

    `number`, `request` and `grant` belong to the current connection: each new connection changes
    them.

    Attributes:
        position: position of the shard in the plan.
        partial: True if the beginning may be granted before the whole shard has arrived.
        unpublished: True if the checked files may be granted before they have their final paths.
        range_number: number of the range in the order that the reader has announced; None for a
            range outside of it, and for a whole shard.
        span: in a plan of ranges, start and end of the bytes that are wanted.
        ahead_to: offset up to which the reader also takes cached bytes after `span`; 0 for none.
        needed: True once the daemon is told that the reader has reached the shard: the reader waits
            for the shard, or holds it. Without a connection, the next request tells it.
        number: the daemon's number of the lease.
        request: id of the last request for the lease.
        grant: the daemon's last grant; None while waiting for a grant.
        latest: True if any version of the shard may be granted, whatever version the plan names.
        named: True if a path that ends with the object's name is wanted as well.
        unmatched: number of the shard's samples read so far that had no partner in the shards that
            are joined with it.
    """

    position: int
    partial: bool
    unpublished: bool = False
    span: tuple[int, int] | None = None
    ahead_to: int = 0
    needed: bool = False
    number: int = 0
    request: int = 0
    grant: Grant | None = None
    latest: bool = False
    named: bool = False
    unmatched: int = 0
    range_number: int | None = None

    @property
    def is_granted_whole(self) -> bool:
        """True if the whole shard is granted."""
        return self.grant is not None and self.grant["type"] != "arriving"

    def release_message(self) -> Json:
        """Return the message that releases the shard."""
        return {"type": "release", "lease": self.number}

    def options(self) -> Json:
        """Return the optional fields of the message that requests the shard."""
        options: Json = {"partial": self.partial}
        if self.unpublished:
            options["unpublished"] = True
        if self.span is not None:
            start, stop = self.span
            options["start"] = start
            options["beyond"] = stop - 1  # in messages, the offset of the last byte
        if self.range_number is not None:
            options["number"] = self.range_number
        if self.ahead_to:
            options["ahead_to"] = self.ahead_to
        if self.latest:
            options["latest"] = True
        if self.named:
            options["named"] = True
        return options
