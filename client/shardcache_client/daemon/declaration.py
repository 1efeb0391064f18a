"""Declaration of a plan to a daemon, with the lists of shards that the daemon lacks.

A plan is an order of shards. It names the shards by numbers in one or more lists, and the lists by
fingerprints (hashes of their content), so that the readers of a node send each list once.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from shardcache.shared import exceptions
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import Json
from shardcache_client.daemon.connection import DaemonConnection
from shardcache_client.order.shards.declared_plan import Plan


class Declaration:
    """A plan as it is declared over one connection.

    The messages that declare a plan are sent one after another, while the reader reads the shards
    that are declared already.

    Args:
        plan: the plan.
        first_position: position of the plan from which on it is declared; position 0 to the daemon.

    Attributes:
        plan: the plan.
        first_position: see above.
        is_accepted: True once `send_through` has declared the positions that were asked of it.
    """

    def __init__(self, plan: Plan, first_position: int) -> None:
        self.plan = plan
        self.first_position = first_position
        self.is_accepted = False
        # Messages that are still to be sent, each a type and its fields.
        self._unsent: Iterator[tuple[str, Json]] = plan.messages(first_position)
        # Id of the request with the last piece sent; 0 once the daemon has accepted it.
        self._piece_request = 0

    def send_through(self, position: int, call: Callable[..., Json]) -> None:
        """Send messages, up to and including the message that declares a position of the plan.

        Args:
            position: the position that must be declared.
            call: sends a message, and returns its answer.

        Raises CapacityError if the daemon forgets the shards that it was just sent, and any error
        that `call` raises.
        """
        declared_to = self.first_position
        for kind, fields in self._unsent:
            # The daemon answers "unknown" to the fingerprint of a list that it does not know.
            if call(kind, **fields)["type"] == "unknown":
                _send_lists_and_repeat(list(self.plan.shards.pieces()), kind, fields, call)
            declared_to += len(fields["order"])
            if declared_to > position:
                break
        self.is_accepted = True

    def send_piece(self, connection: DaemonConnection) -> None:
        """Send the next message, if the daemon has accepted the previous one."""
        if self._piece_request:
            answer = connection.answer(self._piece_request, deadline_s=time.monotonic())
            if answer is None:
                return
            self._piece_request = 0
        message = next(self._unsent, None)
        if message is not None:
            kind, fields = message
            self._piece_request = connection.request(kind, **fields)


def _send_lists_and_repeat(
    lists: Sequence[Shards], kind: str, fields: Json, call: Callable[..., Json]
) -> None:
    """Send the lists that the daemon does not know, then a message that names these lists.

    Args:
        lists: the shards of the plan, in lists that are small enough for a message. The message may
            have named larger ones before.
        kind: type of the message to repeat.
        fields: its fields.
        call: see `send_through`.

    Raises CapacityError if the daemon still does not know the lists.
    """
    for shards in lists:
        # The fingerprint alone is sent first, as a list may be large and the daemon may know it
        # already from another reader.
        if call("shards", fingerprint=shards.fingerprint)["type"] == "unknown":
            call("shards", fingerprint=shards.fingerprint, packed=shards.packed)

    fingerprints = [shards.fingerprint for shards in lists]
    if call(kind, **fields | {"shards": fingerprints})["type"] == "unknown":
        raise exceptions.CapacityError(
            "the daemon forgets the shards", remedy="raise its --plan-memory"
        )
