"""A reader's request for one shard of its plan, and the daemon's grant of it."""

from dataclasses import dataclass
from typing import TypeAlias

from shardcache.shared.protocol import Arriving, Json, Leased

Grant: TypeAlias = Arriving | Leased


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A request for one shard, and the daemon's grant of it.

    `number`, `request` and `grant` are those on the current connection.

    Attributes:
        position: of the shard in the plan.
        partial: True if the beginning may be granted before the whole shard has arrived.
        unpublished: True if the checked files may be granted before they are published.
        first: in a plan of ranges, start and end of the bytes that are wanted.
        ahead_to: offset up to which the reader also takes the bytes after `first`, as far as they
            are cached; 0 for none.
        needed: True once the daemon knows that the reader has reached the shard: it waits for the
            shard, or holds it.
        number: of the lease.
        request: id of the last request for it.
        grant: None while waiting for it.
        latest: True if the present version will do, whatever the plan says.
        named: True if a path that ends with the object's name is wanted as well.
        unmatched: number of samples read that had no partner in the shards joined with it.
    """

    position: int
    partial: bool
    unpublished: bool = False
    first: tuple[int, int] | None = None
    ahead_to: int = 0
    needed: bool = False
    number: int = 0
    request: int = 0
    grant: Grant | None = None
    latest: bool = False
    named: bool = False
    unmatched: int = 0

    @property
    def is_granted_whole(self) -> bool:
        """True if the whole shard is granted."""
        return self.grant is not None and self.grant["type"] != "arriving"

    def options(self) -> Json:
        """Return the optional fields of the message that requests the shard."""
        options: Json = {"partial": self.partial}
        if self.unpublished:
            options["unpublished"] = True
        if self.first is not None:
            start, stop = self.first
            options["start"] = start
            options["beyond"] = stop - 1
        if self.ahead_to:
            options["ahead_to"] = self.ahead_to
        if self.latest:
            options["latest"] = True
        if self.named:
            options["named"] = True
        return options
