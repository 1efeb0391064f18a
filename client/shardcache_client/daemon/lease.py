"""A reader's request for one shard of its plan, and the daemon's grant of it."""

from dataclasses import dataclass
from typing import TypeAlias

from shardcache.protocol import Arriving, Json, Leased

Grant: TypeAlias = Arriving | Leased


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """A request for one shard, and the daemon's grant of it.

    Number, request and grant are those on the current connection.
    """

    position: int  # of the shard in the plan
    partial: bool  # True if the beginning may be granted before the whole shard has arrived
    unpublished: bool = False  # True if the checked files may be granted before they are published
    # With `partial`: start and end of the bytes of a file that are needed first.
    first: tuple[int, int] | None = None
    needed: bool = False  # True once the reader has reached the shard, and holds it or waits for it
    number: int = 0  # of the lease
    request: int = 0  # id of the last request for it
    grant: Grant | None = None  # None while waiting for it
    latest: bool = False  # True if the present version will do, whatever the plan says
    named: bool = False  # True if a path that ends with the object's name is wanted as well
    unmatched: int = 0  # number of samples read that had no partner in the shards joined with it

    def options(self) -> Json:
        """Return the fields of the message that say how the shard is wanted."""
        options: Json = {"partial": self.partial}
        if self.unpublished:
            options["unpublished"] = True
        if self.first is not None:
            options |= {"start": self.first[0], "beyond": self.first[1] - 1}
        if self.latest:
            options["latest"] = True
        if self.named:
            options["named"] = True
        return options
