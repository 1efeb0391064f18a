"""Messages that declare a plan to a daemon, with the lists of shards that the daemon lacks.

A plan is an order of shards. It names the shards by numbers in one or more lists, and the lists by
fingerprints (hashes of their content), so that the readers of a node send each list once.
"""

from collections.abc import Callable, Iterator, Sequence

from shardcache import errors
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import Json
from shardcache_client.order.shards.declared_plan import Plan


def send_through(
    last_position: int,
    plan: Plan,
    messages: Iterator[tuple[str, Json]],
    call: Callable[..., Json],
) -> None:
    """Send the messages of a plan, up to and including the message that declares a position.

    Later messages stay in `messages`. They can be sent while the declared shards are read.

    Args:
        last_position: position that must be declared, counted from the first position in
            `messages`.
        plan: has the lists of shards, for a daemon that does not know them.
        messages: each a type and its fields; see `Plan.messages`.
        call: sends a message, and returns its answer.

    Raises CapacityError if the daemon forgets the shards that it was just sent, and any error that
    `call` raises.
    """
    sent = 0
    for kind, fields in messages:
        # The daemon answers "unknown" if it lacks the list of a fingerprint in the message.
        if call(kind, **fields)["type"] == "unknown":
            lists = list(plan.shards.pieces())
            _send_shards(lists, call)
            _send_with_shards(lists, kind, fields, call)
        sent += len(fields["order"])
        if sent > last_position:
            return


def _send_shards(lists: Sequence[Shards], call: Callable[..., Json]) -> None:
    """Send the lists of shards that the daemon does not know."""
    for shards in lists:
        # The fingerprint alone is sent first, as a list may be large and the daemon may know it
        # already from another reader.
        if call("shards", fingerprint=shards.fingerprint)["type"] == "unknown":
            call("shards", fingerprint=shards.fingerprint, packed=shards.packed)


def _send_with_shards(
    lists: Sequence[Shards], kind: str, fields: Json, call: Callable[..., Json]
) -> None:
    """Send a message again, with the fingerprints of the lists that were just sent.

    Raises CapacityError if the daemon still does not know the lists.
    """
    fingerprints = [shards.fingerprint for shards in lists]
    if call(kind, **fields | {"shards": fingerprints})["type"] == "unknown":
        raise errors.CapacityError(
            "the daemon forgets the shards", remedy="raise its --plan-memory"
        )
