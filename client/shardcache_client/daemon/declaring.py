"""Messages that declare a plan to a daemon, with the lists of shards that it does not know."""

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
    """Send messages of a plan, up to the one that declares a position.

    The later ones stay in `messages`, to be sent while the shards of these are read.

    Args:
        last_position: to be declared, counted from the first position that is sent.
        plan: has the shards, for a daemon that does not know them.
        messages: each a type and its fields; see `Plan.messages`.
        call: sends a message, and returns its answer.

    Raises CapacityError if the daemon forgets the shards that it was just sent, and what `call`
    raises.
    """
    sent = 0
    for kind, fields in messages:
        # A plan names its lists of shards by fingerprints, of which the daemon may lack some.
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
        # Its fingerprint first: a list may be large, and another reader may have sent it already.
        if call("shards", fingerprint=shards.fingerprint)["type"] == "unknown":
            call("shards", fingerprint=shards.fingerprint, packed=shards.packed)


def _send_with_shards(
    lists: Sequence[Shards], kind: str, fields: Json, call: Callable[..., Json]
) -> None:
    """Send a message again, with the fingerprints of the lists that were just sent."""
    fingerprints = [shards.fingerprint for shards in lists]
    if call(kind, **fields | {"shards": fingerprints})["type"] == "unknown":
        raise errors.CapacityError(
            "the daemon forgets the shards", remedy="raise its --plan-memory"
        )
