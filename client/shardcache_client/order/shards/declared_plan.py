"""One reader's plan to read shards, as it is declared to the daemon. It does no I/O.

A plan is the list of shards in the order in which a reader will need them, so that the daemon can
fetch them in advance. A position is an index into this list. A reader declares its plan when it
begins an epoch, in several messages if the plan is long.

A dataset may have joined shards, which have further members for its samples: each is read together
with a shard of the dataset. `manifest.planned` has all of them: first the dataset's shards, then
the joined ones. A plan has the shards' numbers in this list.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef, Wanted
from shardcache_client.order.shards.manifest import Manifest

# Maximum number of positions in a plan's first message, and in each message that extends the plan.
_FIRST_MESSAGE = 1_000
_NEXT_MESSAGE = 4_000


def _no_shards() -> tuple[int, ...]:
    """Return the numbers of no shards: the next epoch is unknown."""
    return ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The shards that one reader will read, as declared to the daemon.

    Attributes:
        epoch: number of the epoch.
        manifest: the shards of the dataset.
        order: numbers of the shards that this epoch reads, in order.
        next_order: returns the numbers of the shards that the next epoch reads, in order.
        wanted: kind of data that the reader reads of the shards; see `protocol`.
    """

    epoch: int
    manifest: Manifest
    order: "array[int]"
    next_order: Callable[[], Iterable[int]] = _no_shards
    wanted: Wanted = "samples"

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        epoch: int,
        now: Iterable[int],
        after: Callable[[], Iterable[int]] = _no_shards,
        wanted: Wanted = "samples",
    ) -> "Plan":
        """Build a plan from the dataset's own shards, to which this adds the joined ones.

        Args:
            manifest: the shards of the dataset.
            epoch: number of the epoch.
            now: numbers of the dataset's shards that this epoch reads, in order.
            after: returns the numbers of the dataset's shards that the next epoch reads, in order.
            wanted: see `Plan`.
        """
        order = array("I", _with_joined(manifest, now))
        return cls(epoch, manifest, order, lambda: _with_joined(manifest, after()), wanted)

    @property
    def reads(self) -> int:
        """Number of positions of this epoch."""
        return len(self.order)

    @property
    def shards(self) -> Shards:
        """All shards of the dataset, including joined ones."""
        return self.manifest.planned.shards

    def shard(self, position: int) -> ShardRef:
        """Return the shard at a position."""
        return self.shards[self.order[position]]

    def messages(self, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages that declare the plan from position `start` on, as (type, fields).

        The first message is a `plan`, which is small for a quick start. Each other message is an
        `extend`, with further positions. The positions of the next epoch follow those of this one.
        Messages are built lazily, and so is the order of the next epoch, which takes a while for
        many shards.
        """
        order = self.order[start:]
        # If the first message has room after this epoch's positions, the next epoch's follow in the
        # same message. The message says how many are this epoch's.
        head = self._head(self.reads - start)
        first_has_room = len(order) < _FIRST_MESSAGE
        if first_has_room:
            order = array("I", chain(order, self.next_order()))

        yield "plan", head | {"order": order[:_FIRST_MESSAGE].tolist()}
        yield from _extensions(order[_FIRST_MESSAGE:])
        if not first_has_room:
            yield from _extensions(array("I", self.next_order()))

    def _head(self, reads: int) -> dict[str, Any]:
        """Return the fields of a `plan` message without its order.

        Args:
            reads: number of this epoch's positions in the message and its extensions. All further
                positions are the next epoch's.
        """
        planned = self.manifest.planned
        # The daemon knows the lists of shards that it has resolved by their fingerprints. `lists`
        # has the fingerprints of the lists that the planned shards are from. It is empty if
        # `planned` is itself such a list.
        fingerprints = planned.lists or (planned.fingerprint,)
        head: dict[str, Any] = {
            "shards": fingerprints,
            "epoch": self.epoch,
            "reads": reads,
        }
        if self.wanted != "samples":
            head["wanted"] = self.wanted
        return head


def _with_joined(manifest: Manifest, shards: Iterable[int]) -> Iterable[int]:
    """Return the numbers of shards, each followed by the numbers of the shards joined to it."""
    has_joined_shards = bool(manifest.columns)
    if not has_joined_shards:
        return shards
    return chain.from_iterable(map(manifest.with_joined, shards))


def _extensions(order: "array[int]") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the messages that extend a plan by further positions."""
    for begin in range(0, len(order), _NEXT_MESSAGE):
        yield "extend", {"order": order[begin : begin + _NEXT_MESSAGE].tolist()}
