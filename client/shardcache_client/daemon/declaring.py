"""Messages by which a daemon learns a plan: its pieces, and the shards that it does not know."""

from collections.abc import Callable, Iterator

from shardcache import errors
from shardcache.protocol import Json
from shardcache_client.order.manifest import Plan


def send_until(position: int, plan: Plan, pieces: Iterator[tuple[str, Json]], call: Callable[..., Json]) -> None:
    """Send pieces of a plan until the daemon has those up to a position, counted from the first.

    `call` sends a message and returns its answer. Raises CapacityError if the daemon forgets the
    shards that it was just sent, and what `call` raises.
    """
    sent = 0
    for kind, fields in pieces:
        if call(kind, **fields)["type"] == "unknown":
            _send_shards(plan, kind, fields, call)
        sent += len(fields["order"])
        if sent > position:
            return


def _send_shards(plan: Plan, kind: str, fields: Json, call: Callable[..., Json]) -> None:
    """Send the shards that the daemon does not know, then the piece of the plan again."""
    lists = list(plan.shards.pieces())
    for each in lists:
        if call("shards", fingerprint=each.fingerprint)["type"] == "unknown":
            call("shards", fingerprint=each.fingerprint, packed=each.packed)

    fingerprints = [each.fingerprint for each in lists]
    if call(kind, **fields | {"shards": fingerprints})["type"] == "unknown":
        raise errors.CapacityError("the daemon forgets the shards", remedy="raise its --plan-memory")
